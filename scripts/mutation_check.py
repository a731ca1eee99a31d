"""Seeds ordering bugs one by one and shows that the exactness tests catch each.

    python scripts/mutation_check.py [--schedules 40] [--only NAME ...]

Each mutation is a textual change to a copy of the package; random schedules over late lanes run on
the copy until one fails. Prints a line of JSON per mutation; exit status 1 if one survives.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from arguments import at_least

ROOT = Path(__file__).resolve().parent.parent


# An editable installation would find the package where it was installed from, not in the copy.
RUN_COPY = """
import runpy, sys
sys.path.insert(0, "scripts")
sys.meta_path = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
sys.argv[0] = "scripts/exactness.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str
    new: str


MUTATIONS = (
    Mutation(
        "a ticket is consumed twice",
        "pipelines/parked.py",
        "                self._parked.remove(cohort)\n",
        "",
    ),
    Mutation(
        "a cohort merges at a later layer than its own",
        "pipelines/parked.py",
        "if cohort.layer == layer]",
        "if cohort.layer in (layer, layer - 1)]",
    ),
    Mutation(
        "a cohort parks with the residual of its first layer",
        "pipelines/walk.py",
        "            self._parked.park(layer, rider, residual, qkv[rows])",
        "            stale = self._parked.__dict__.setdefault('stale', {})\n"
        "            token = (rider.request_ids, rider.token_indices)\n"
        "            kept = stale.setdefault(token, residual)\n"
        "            self._parked.park(layer, rider, kept, qkv[rows])",
    ),
    Mutation(
        "an aborted request is freed while its attention is in flight",
        "scheduler/state.py",
        "        if request.in_flight:\n            self._draining",
        "        if False:\n            self._draining",
    ),
    Mutation(
        "aborted rows stay in their cohort",
        "pipelines/parked.py",
        "        if not gone:\n",
        "        if True:\n",
    ),
    Mutation(
        "a moved request is used before its copies have retired",
        "worker/worker.py",
        "        for ticket in moves:\n            ticket.wait()\n",
        "",
    ),
    Mutation(
        "the blocks that a move leaves are reused before the copy has read them",
        "kv/block_manager.py",
        "        holding.leaving = (holding.side, holding.blocks)\n"
        "        self._num_leaving[holding.side] += len(holding.blocks)\n",
        "        holding.leaving = (holding.side, [])\n"
        "        self._free[holding.side].extend(reversed(holding.blocks))\n",
    ),
    Mutation(
        "wrong position after a move",
        "scheduler/state.py",
        "Row(request.request_id, request.placement, request.num_computed, None, True)",
        "Row(request.request_id, request.placement, "
        "request.num_computed - min(1, self.num_moves), None, True)",
    ),
    Mutation(
        "a move mixes up its blocks",
        "worker/request_table.py",
        "self._append_blocks(move.request_id, move.target_blocks)",
        "self._append_blocks(move.request_id, move.target_blocks[::-1])",
    ),
    Mutation(
        "a decode's K and V are appended one position early",
        "worker/bind.py",
        "[row.start + row.num_tokens for row in self.rows], dtype",
        "[row.start + row.num_tokens - row.is_decode for row in self.rows], dtype",
    ),
    Mutation(
        "the last block of a staged chunk is not written out",
        "worker/bind.py",
        "            touched.local.extend(local[first:])\n"
        "            touched.remote.extend(remote[first:])\n",
        "            touched.local.extend(local[first : count - 1])\n"
        "            touched.remote.extend(remote[first : count - 1])\n",
    ),
    Mutation(
        "a staged chunk attends before its prefix is back",
        "kv/staging.py",
        "        self._wait(slot)\n        kv = self._store",
        "        kv = self._store",
    ),
    Mutation(
        "a CPU decode begins before the last staged copy has retired",
        "worker/worker.py",
        "            staged.finish()\n",
        "            pass\n",
    ),
    Mutation(
        "sampled tokens go to the wrong rows",
        "worker/completion.py",
        "self._table.last_tokens[slots] = sampled.token_ids",
        "self._table.last_tokens[slots.flip(0)] = sampled.token_ids",
    ),
    Mutation(
        "a recomputed request does not bring its last token",
        "worker/request_table.py",
        "self.last_tokens[slot].fill_(admission.last_token)",
        "self.last_tokens[slot].fill_(0)",
    ),
    Mutation(
        "a rejoining cohort keeps the rotation of the rows before it",
        "pipelines/walk.py",
        "joined([batch.rotation for batch in self._batches()])",
        "joined([batch.rotation for batch in self._batches()]).roll(1, 0)",
    ),
)

NO_BUG = Mutation("none", "pipelines/walk.py", "class Walk:", "class Walk:")


def survives(mutation: Mutation, schedules: int) -> tuple[bool, str]:
    """Runs random and APEX schedules on a mutated copy: whether all pass, and what failed."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("swiftapex", "tests", "scripts"):
            shutil.copytree(ROOT / name, Path(folder) / name)
        path = Path(folder) / "swiftapex" / mutation.file
        text = path.read_text()
        assert text.count(mutation.old) == 1, f"{mutation.name}: not found once in {mutation.file}"
        path.write_text(text.replace(mutation.old, mutation.new))
        for native in ("_kernels_cpu", "_kernels_cuda"):
            spec = importlib.util.find_spec(f"swiftapex.{native}")
            if spec is not None and spec.origin is not None:
                shutil.copy(spec.origin, Path(folder) / "swiftapex")
        command = [sys.executable, "-c", RUN_COPY, "--models", "gqa-3", "--jobs", "1"]
        command += ["--strategies", "random", "apex", "--schedules", str(schedules)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        failures = [failure for line in lines for failure in line.get("failures", ())]
        assert not any("No module" in failure for failure in failures), failures[0]
        assert lines and folder in lines[-1]["package"], f"the copy did not run: {done.stderr}"
        return (
            not failures,
            f"{len(failures)} schedules fail, as: {failures[0]}" if failures else "",
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schedules", type=at_least(1, int), default=40)
    parser.add_argument("--only", nargs="+", help="names of mutations")
    parser.add_argument("--jobs", type=at_least(1, int), default=1)
    args = parser.parse_args()
    sound, what = survives(NO_BUG, args.schedules)
    assert sound, f"the schedules fail without a bug: {what}"
    chosen = [m for m in MUTATIONS if not args.only or m.name in args.only]
    survivors = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = pool.map(lambda mutation: survives(mutation, args.schedules), chosen)
        for mutation, (survived, what) in zip(chosen, outcomes, strict=True):
            survivors += survived
            line = {"bug": mutation.name, "caught": not survived, "by": what}
            print(json.dumps(line), flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
