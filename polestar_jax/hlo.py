"""Reads compiled HLO as text: which instructions a branch of the decode runs, and what they yield."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator

_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_CALLED = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:body|to_apply|calls)=%?([\w.-]+))")
_COMMENT = re.compile(r"/\*.*?\*/")
_TILED = '"kind":"__triton_nested_gemm_fusion"'
_NAME = re.compile(r"%([\w.-]+)")
_TRANSFER = "copy-start"
# They run nothing on a device: values are named, grouped or looked at differently.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier async-start async-update async-done"
    " copy-done conditional while call".split()
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
      name, opcode: as printed.
      shape: of its result, such as "bf16[1,32,4096]"; layouts are cut off.
      called: computations it runs: branches, a loop's body, an asynchronous call.
      operands: names of instructions.
    """

    name: str
    opcode: str
    shape: str
    called: tuple[str, ...]
    operands: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """Computations by name, which of them is entered, and those that a product works through tile by tile."""

    computations: dict[str, list[Instruction]]
    entry: str
    tiled: frozenset[str] = frozenset()

    def walk(self, computation: str) -> Iterator[Instruction]:
        """Every instruction that runs when `computation` does; of a conditional, all of its branches."""
        for instruction in self.computations[computation]:
            yield instruction
            for called in _flow(instruction):
                yield from self.walk(called)

    def kernels(self, computation: str) -> int:
        """Device operations of one run; of a conditional the longest branch, of a loop one round."""
        return self._count(computation, lambda instruction: instruction.opcode not in _FREE | {_TRANSFER})

    def transfers(self, computation: str) -> int:
        """Asynchronous copies of one run, which are no kernels: the copy engines do them, to and from host memory."""
        return self._count(computation, lambda instruction: instruction.opcode == _TRANSFER)

    def transfers_beside(self, computation: str) -> int:
        """Those of the transfers between whose start and end the program goes on with a product or a kernel of ours."""
        return self._count(computation, lambda instruction: instruction.name in self._beside)

    @functools.cached_property
    def _beside(self) -> frozenset[str]:
        found = set()
        for instructions in self.computations.values():
            place = {each.name: index for index, each in enumerate(instructions)}
            for end, done in enumerate(instructions):
                if done.opcode == "copy-done":
                    start = done.operands[0]
                    found |= {start for each in instructions[place[start] : end] if self._multiplies(each)}
        return frozenset(found)

    def _multiplies(self, instruction: Instruction) -> bool:
        if instruction.opcode in ("dot", "custom-call") or self.tiled.intersection(instruction.called):
            return True
        return any(self._multiplies(each) for called in _flow(instruction) for each in self.computations[called])

    def _count(self, computation: str, counts: Callable[[Instruction], bool]) -> int:
        count = 0
        for instruction in self.computations[computation]:
            inner = [self._count(called, counts) for called in _flow(instruction)]
            count += max(inner) if instruction.opcode == "conditional" else sum(inner)
            count += counts(instruction)
        return count

    def decode_branches(self) -> tuple[str, ...]:
        """The computations of the decode's kinds of forward, in order; if there is one kind only, the loop's body.

        Raises:
          ValueError: if the program is not a compiled decode.
        """
        loops = [each for each in self.walk(self.entry) if each.opcode == "while"]
        if not loops:
            raise ValueError("the program has no loop: it is not a compiled decode")
        body = loops[0].called[0]
        branching = [each for each in self.walk(body) if each.opcode == "conditional"]
        return branching[0].called if branching else (body,)


def parse(text: str) -> Program:
    """A program from `compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    entry, current, tiled = "", None, set()
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(_COMMENT.sub("", line))):
            name, shape, opcode, rest = found.groups()
            called = tuple(
                part.strip().lstrip("%")
                for several, one in _CALLED.findall(rest)
                for part in (several.split(",") if several else (one,))
            )
            operands = tuple(_NAME.findall(rest.partition(")")[0]))
            current.append(Instruction(name, opcode, re.sub(r"\{[\d,:TSE()]*\}", "", shape), called, operands))
            tiled.update(called if _TILED in rest else ())
    return Program(computations, entry, frozenset(tiled))


def copies_of(program: Program, shapes: set[str]) -> list[Instruction]:
    """Instructions, parameters aside, that yield an array of one of these shapes: a weight that was copied.

    Computations that a fusion or a reduction calls count too: a slice read inside one is the same extra array. Those
    of a Triton product do not: they say where a tile is loaded from, and nothing in them is ever whole.
    """
    harmless = {"parameter", "get-tuple-element", "bitcast"}
    return [
        instruction
        for name, instructions in program.computations.items()
        if name not in program.tiled
        for instruction in instructions
        if instruction.shape in shapes and instruction.opcode not in harmless
    ]


def _flow(instruction: Instruction) -> tuple[str, ...]:
    """Computations that an instruction hands control to, not those that a fusion or a reduction is made of."""
    flows = instruction.opcode in ("conditional", "while", "call", "async-start")
    return instruction.called if flows else ()
