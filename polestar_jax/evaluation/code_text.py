"""From a model's answer to a program: how the papers of this field read answers to HumanEval and MBPP."""

import ast
import re

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_MOST_LINES = 100


def fenced_code(answer: str) -> str:
    """The first fenced block of an answer, open or closed; the whole answer if it has none."""
    found = _FENCE.search(answer)
    return found.group(1) if found else answer


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def longest_program(text: str) -> str:
    """The longest run of lines, by lines with content, that parses; of the first hundred lines."""
    lines = text.splitlines()[:_MOST_LINES]
    content = [0]
    for line in lines:
        content.append(content[-1] + bool(line.strip()))
    spans = [(start, stop) for start in range(len(lines)) for stop in range(start + 1, len(lines) + 1)]
    # Longest first, so that the first that parses is the answer; earlier ones before later ones of equal length.
    spans.sort(key=lambda span: (content[span[0]] - content[span[1]], span))
    return next(("\n".join(lines[a:b]) for a, b in spans if parses("\n".join(lines[a:b]))), "")


def reachable(program: str, entry_point: str) -> str:
    """The imports, and the definitions and assignments that `entry_point` needs, directly or through others.

    A program without that definition is returned as it is: its tests will say so.
    """
    tree = ast.parse(program)
    names: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id: node for each in targets for part in ast.walk(each) if isinstance(part, ast.Name)}
    if entry_point not in names:
        return program
    needed, queue = {entry_point}, [entry_point]
    while queue:
        used = {part.id for part in ast.walk(names[queue.pop()]) if isinstance(part, ast.Name)}
        queue += [name for name in used & names.keys() if name not in needed]
        needed |= used & names.keys()
    kept = {id(names[name]) for name in needed}
    imports = (ast.Import, ast.ImportFrom)
    return "\n".join(ast.unparse(node) for node in tree.body if isinstance(node, imports) or id(node) in kept)


def program_of(answer: str, entry_point: str, stub: str = "") -> str:
    """The program to test.

    Args:
      answer: what the model wrote.
      entry_point: the function under test.
      stub: text that the answer may continue, such as HumanEval's prompt; it is put in front.
    """
    program = longest_program(f"{stub}\n{fenced_code(answer)}" if stub else fenced_code(answer))
    return reachable(program, entry_point) if program else ""
