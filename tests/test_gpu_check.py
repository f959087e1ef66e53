"""The scripts that plan for GPUs and measure on them, as far as a machine without one can tell."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from methods_table import FAMILIES

from models.published import PUBLISHED
from polestar_jax import methods
from polestar_jax.analysis.costs import CEILINGS, Work, forward_work, host_bytes

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_least_work_by_hand():
    model = FAMILIES["llada"]
    config, params = model.config, model.abstract_params()
    size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    weights = 4 * (size(params) - size(params["embedding"]))
    assert set(forward_work(model, methods.vanilla(block_length=4), 5, 16)) == {"full"}
    full = forward_work(model, methods.vanilla(block_length=4), 5, 16)["full"]
    matrices = sum(leaf.size for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim == 2)
    head = config.vocab_size * config.model_size
    products = 21 * matrices + 4 * head + 2 * 21 * 21 * config.model_size * config.layers
    assert full == Work(weights, 2 * products)
    dual = forward_work(model, methods.fast_dllm(block_length=4), 5, 16)
    row = 2 * 4 * config.layers * config.kv_heads * config.model_size // config.heads  # bytes of its keys and values
    assert dual["step"].bytes == weights + (21 + 4) * row
    assert dual["entry"].bytes == weights + 21 * row
    assert dual["entry"].operations == full.operations
    polestar = forward_work(model, methods.polestar(block_length=4), 5, 16)
    assert polestar["step"].bytes > dual["step"].bytes, "it compares attention with that of the forward before"
    assert polestar["step"].operations < polestar["refresh"].operations < polestar["full entry"].operations
    assert forward_work(model, methods.fast_dllm(block_length=4, cache="prefix"), 5, 16) == {}


def test_least_time_is_the_larger_of_both():
    h200 = CEILINGS["h200"]
    assert Work(48_000_000_000, 10).seconds(h200) == pytest.approx(0.01)
    assert Work(10, 9_894_000_000_000).seconds(h200) == pytest.approx(0.01)


def test_codes_in_host_memory():
    model = PUBLISHED["llada-8b"]
    assert host_bytes(model, methods.polestar(), 1024, 256) == 0
    expected = 32 * 96 * (4096 // 2 + 4096 // 16)
    assert host_bytes(model, methods.polestar(offload="host"), 1024, 256) == expected


def test_a_table_with_failures_and_a_line_cut_off(tmp_path):
    import plan_all

    options = dict(prompt_length=1024, layers=None, gpus="h200", cells="")
    cells = plan_all.make_cells(plan_all.argparse.Namespace(**options))
    assert len(cells) == 16 and cells[0].method == "polestar"
    assert len({cell.name for cell in cells}) == 16
    (only,) = plan_all.make_cells(plan_all.argparse.Namespace(**options | {"cells": "dream-7b,512,dual"}))
    path = tmp_path / "results.jsonl"
    plan = dict(weights=16e9, state=1e9, temporaries=0.5e9, total=17.5e9, host=7e6, layers=2, copied_weights=[])
    plan |= dict(kernels={"step": 30, "entry": 50}, transfers={"step": 0, "entry": 4})
    plan |= dict(lower_seconds=1.0, compile_seconds=2.0)
    least = {kind: {"bytes": 15e9, "operations": 5e11, "seconds": 0.003} for kind in ("step", "entry")}
    done = {"cell": only._asdict(), "plan": plan, "least": least, "state_on_host": 0}
    done["environment"] = {"jax": "1.2", "revision": "abc"}
    failed = {"cell": cells[0]._asdict(), "error": "RuntimeError: a | b"}
    records = [{"cell": only._asdict(), "error": "first try"}, failed, done]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + json.dumps(done)[:40] + "\n")
    read = plan_all.read_records(path)
    assert read == {cells[0]: failed, only: done}
    lines = plan_all.make_table(list(read.values())).splitlines()
    rows = {line.count("|") - 2 * line.count("\\|") + line.count("\\|") for line in lines if line.startswith("|")}
    assert len(rows) == 1, "a row has other columns than the head"
    text = "\n".join(lines)
    assert "failed: RuntimeError: a \\| b" in text and "**17.50**" in text and "step 15.0<br>entry 25.0 + 2.0" in text
    assert "first try" not in text and "18.6 GB" in text and "jax 1.2 at abc" in text


def test_a_cell_that_does_not_compile_is_a_record(monkeypatch):
    import plan_all

    cell = plan_all.Cell("llada-8b", 256, "polestar", "h200", 1024, None)
    run = lambda code, timeout=60: (
        monkeypatch.setattr(plan_all.Cell, "command", lambda self: [sys.executable, "-c", code]),
        plan_all.Compiler(timeout).compile(cell),
    )[1]
    assert run("raise SystemExit('no such flag')")["error"] == "no such flag"
    told = "import sys; print('Traceback\\njax.errors.JaxRuntimeError: no\\nsee also', file=sys.stderr); sys.exit(1)"
    assert run(told)["error"] == "jax.errors.JaxRuntimeError: no"
    assert "no JSON" in run("print('hello')")["error"]
    assert run("import time; time.sleep(60)", 0.5)["error"] == "not done after 0 s"
    assert run("print('{\"plan\": 1}')")["plan"] == 1


def test_times_of_kinds_from_whole_decodes():
    import gpu_decodes

    model, shape = gpu_decodes.shape_of(rehearse=True)
    decodes = dict(gpu_decodes.variants("polestar", shape, "none", None, model))
    true = dict(zip(("step", "refresh", "window entry", "full entry"), (4.0, 5.0, 6.0, 30.0), strict=True))
    counts = [(62, 0, 4, 4), (200, 48, 4, 4), (0, 62, 4, 4), (50, 12, 7, 1), (50, 12, 0, 8), (50, 12, 4, 4)]
    runs = {}
    for label, numbers in zip(decodes, counts, strict=True):
        kinds = dict(zip(true, numbers, strict=True))
        seconds = sum(true[kind] * count for kind, count in kinds.items()) / 1e3
        runs[label] = {"kinds": kinds, "seconds": [seconds, 9.9, seconds], "forwards": sum(numbers)}
    found = gpu_decodes.summarise("polestar", shape, runs, decodes["paper"])
    assert found["ms"] == pytest.approx(true)
    assert found["largest misfit of a decode"] < 1e-6
    assert found["tps"] == pytest.approx(shape.gen_length / 0.392)
    assert len({jax.tree.structure(decode.method) for decode in decodes.values()}) == 1, "it would recompile"


def test_a_wrong_kernel_is_not_the_same():
    import gpu_kernels

    arguments = gpu_kernels.draw("confident_argmax", gpu_kernels.TINY["one row"], 0)
    op, _ = gpu_kernels.OPS["confident_argmax"]
    token, confidence = op(*arguments, implementation="xla")
    check = lambda *found: gpu_kernels.is_within(
        "confident_argmax", gpu_kernels.differences("confident_argmax", found, (token, confidence))
    )
    assert check(token, confidence) and check(token + 1, confidence), "words that are as likely are a tie"
    assert not check(token, 1.1 * confidence) and not check(token + 1, 1.005 * confidence)
    assert not check(token, np.nan * confidence)


def test_a_part_that_hangs_or_crashes_is_recorded(tmp_path, monkeypatch):
    import gpu_check

    script = tmp_path / "part.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "target = pathlib.Path(sys.argv[sys.argv.index('--json') + 1])\n"
        "target.write_text('{\"so far\": 1}')\n"
        "print('hello')\n"
        "sys.stdout.flush()\n"
        "os.kill(os.getpid(), 11) if 'crash' in sys.argv else time.sleep(60)\n"
    )
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    part = lambda word: gpu_check.Part(word, (word,), 0, 10)
    crashed = gpu_check.start_part(part("crash"), 30, tmp_path / "scratch", rehearse=True)
    assert crashed["status"] == f"failed with exit status {-signal.SIGSEGV}"
    assert crashed["results"] == {"so far": 1} and crashed["log"] == ["hello"]
    begin = time.monotonic()
    hung = gpu_check.start_part(part("hang"), 1.5, tmp_path / "scratch", rehearse=True)
    assert hung["status"] == "stopped after 2 s" and hung["results"] == {"so far": 1}
    assert time.monotonic() - begin < 20
    assert [path.name for path in tmp_path.iterdir()] == ["part.py"]


def test_what_no_longer_fits_is_left_out(tmp_path, monkeypatch, capsys):
    import gpu_check

    part = lambda name, least, **more: gpu_check.Part(name, (name,), least, 50, **more)
    parts = [part("device", 0), part("first", 5), part("instead", 5, instead_of="first")]
    parts += [part("broken", 5), part("again", 5, instead_of="broken"), part("long", 99)]
    monkeypatch.setattr(gpu_check, "make_parts", lambda rehearse: parts)
    limits = {}

    def start(part, limit, target, rehearse):
        limits[part.name] = limit
        status = "failed with exit status 1" if part.name == "broken" else "done"
        return {"status": status, "seconds": 1.0, "flags": "", "results": {}}

    monkeypatch.setattr(gpu_check, "start_part", start)
    options = gpu_check.argparse.Namespace(budget=60, only="", rehearse=False, json=tmp_path / "found.json")
    assert gpu_check.run_all(options) == 1
    assert list(limits) == ["device", "first", "broken", "again"] and max(limits.values()) <= 50
    found = json.loads(options.json.read_text())["parts"]
    assert found["long"]["status"].startswith("left out") and "instead" not in found
    assert "long: left out" in capsys.readouterr().out


@pytest.mark.slow
def test_rehearsal(tmp_path):
    """Every line of the GPU script but those that name a GPU."""
    target = tmp_path / "found.json"
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--rehearse", "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    content = json.loads(target.read_text())
    assert content["rehearsal"] and {part["status"] for part in content["parts"].values()} == {"done"}
    cases = content["parts"]["kernels at other shapes"]["results"]["cases"]
    assert len(cases) == 7 and all(case["same"] and len(case["ms"]) == 2 for case in cases)
    assert content["parts"]["polestar with kernels offloaded"]["results"]["copies"]["bytes"] > 0
    assert "REHEARSAL" in done.stdout


def test_the_report_of_what_was_found(capsys):
    """One kernel that agrees and one that failed; two decodes, of which one drifts to infinity."""
    from gpu_report import print_report

    cases = [
        {"op": "attention", "shape": "llada-8b", "bytes": 2e7, "in cache": True, "same": True, "ms": {"mosaic": 0.01}},
        {"op": "proxy_drift", "shape": "llada-8b", "bytes": 1e7, "ms": {}, "error": "XlaRuntimeError: misaligned"},
    ]
    decode = {
        "tps": 100.0,
        "positions per forward": 3.0,
        "scaled": False,
        "parameters": 8e9,
        "dtype": "bfloat16",
        "peak bytes": 17e9,
        "peak bytes, making weights": 16e9,
        "seconds to the end of the first decode, compilation included": 90.0,
        "ms": {"step": 4.0, "refresh": 5.0},
        "layers": 32,
        "largest misfit of a decode": 0.01,
        "runs": {"paper": {"tokens": [1, 2, 3, 4], "drift is finite": True}},
    }
    other = decode | {"tps": 50.0, "runs": {"paper": {"tokens": [1, 2, 3, 5], "drift is finite": False}}}
    part = lambda results: {"status": "done", "results": results}
    parts = {"device": part({"bandwidth by data sheet": 4.8e12}), "attention": part({"cases": cases})}
    parts |= {"polestar with kernels": part(decode), "polestar without kernels": part(other)}
    print_report({"rehearsal": False, "parts": parts | {"vanilla with kernels": {"status": "stopped after 80 s"}}})
    text = capsys.readouterr().out
    for words in (
        "L2 cache",
        "misaligned",
        "0.031 ms per layer",
        "2.00 times",
        "75% of the tokens",
        "stopped after 80 s",
    ):
        assert words in text
    assert text.count("NOT FINITE") == 1
