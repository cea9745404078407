"""Ten ways to break the ledger, the loss, the masks and the weights, each of which a test must notice.

    python tests/mutations.py [NAME ...]

Every mutation is one replacement in a private copy of the project, in which the named tests then run and must fail
(and, before that, pass without it). Exit status 0 when every mutation was caught.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """Replace `old`, which occurs exactly once in `file`, by `new`."""

    file: str
    old: str
    new: str
    tests: str


MUTATIONS = {
    "ledger-admits-one-step-too-many": Mutation(
        "zbgrpo/ledger/ledger.py",
        "places = (applied + 1 + options.max_staleness)",
        "places = (applied + 2 + options.max_staleness)",
        "tests/unit/test_ledger_rules.py",
    ),
    "ledger-forgets-what-has-ended": Mutation(
        "zbgrpo/ledger/order.py",
        "np.zeros(self.num_rows, dtype=bool))[uid.row] = True",
        "np.zeros(self.num_rows, dtype=bool))[uid.row] = False",
        "tests/unit/test_ledger_rules.py tests/unit/test_ledger_parts.py",
    ),
    "strict-mode-lets-a-straggler-expire": Mutation(
        "zbgrpo/ledger/planning.py",
        "if number > (deadline + 1) * groups_per_step - filled:",
        "if number > (deadline + 2) * groups_per_step - filled:",
        "tests/unit/test_ledger_parts.py tests/unit/test_ledger_plans.py",
    ),
    "link-delivers-duplicates": Mutation(
        "zbgrpo/transport/link.py",
        "if self.expects(sequence):",
        "if sequence >= self.received:",
        "tests/unit/test_link.py",
    ),
    "loss-clips-the-wrong-side": Mutation(
        "zbgrpo/algorithms/losses.py",
        "torch.minimum(unclipped, clipped)",
        "torch.maximum(unclipped, clipped)",
        "tests/unit/test_algorithms_losses.py",
    ),
    "gradient-is-not-divided": Mutation(
        "zbgrpo/trainer/torch_backend.py",
        "self.parameters.scale(1.0 / denominator)",
        "self.parameters.scale(1.0)",
        "tests/unit/test_trainer_split.py",
    ),
    "responses-see-each-other": Mutation(
        "zbgrpo/algorithms/packing.py",
        "(segment[:, None, :] == 0) | (segment[:, None, :] == segment[:, :, None])",
        "(segment[:, None, :] >= 0) | (segment[:, None, :] == segment[:, :, None])",
        "tests/unit/test_packing.py",
    ),
    "lag-bound-is-off-by-one": Mutation(
        "zbgrpo/algorithms/packing.py",
        "self.mask = self.lag <= rules.max_token_lag",
        "self.mask = self.lag < rules.max_token_lag",
        "tests/unit/test_packing.py",
    ),
    "tokens-forget-their-version": Mutation(
        "zbgrpo/inference/transformers_backend.py",
        "if slot.spans[-1][1] != self._version:",
        "if slot.spans[-1][1] > self._version:",
        "tests/contract/test_inference_backend.py",
    ),
    "half-a-version-is-used": Mutation(
        "zbgrpo/weights/subscriber.py",
        'if sent_version != version or f"{sent_digest:016x}" != value:',
        "if sent_version != version:",
        "tests/dist/test_weights.py",
    ),
}


def main(names: list[str]) -> int:
    """Run the named mutations, or all; the exit status."""
    missed = []
    for name in names or MUTATIONS:
        mutation = MUTATIONS[name]
        with tempfile.TemporaryDirectory(prefix="zbgrpo-mutation-") as folder:
            copy = Path(folder)
            for part in ("zbgrpo", "tests", "pyproject.toml"):
                source = REPOSITORY / part
                if source.is_dir():
                    shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(source, copy / part)
            path = copy / mutation.file
            text = path.read_text()
            assert text.count(mutation.old) == 1, f"{name}: {mutation.old!r} is not there exactly once"
            sound = _passes(copy, mutation.tests)
            path.write_text(text.replace(mutation.old, mutation.new))
            caught = sound and not _passes(copy, mutation.tests)
        print(f"{'caught' if caught else 'MISSED' if sound else 'BROKEN'}  {name}  ({mutation.tests})", flush=True)
        if not caught:
            missed.append(name)
    print(f"{len(names or MUTATIONS) - len(missed)} of {len(names or MUTATIONS)} mutations caught")
    return 1 if missed else 0


def _passes(folder: Path, tests: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
    result = subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=600)
    return result.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
