#!/usr/bin/env bash
# datasets==5.2.0, torch==2.13.0. Expected: load_state_dict of a streamed dataset is used up by the pass that it
# resumes; the next `for` over the dataset gives all rows. Real: it stays. Every later pass starts at the resumed place
# again, so the rows before it are never seen again, and after a state of the end of an epoch every pass is empty.
# set_epoch with another number ends it, which one has little reason to call without shuffling. Through a DataLoader it
# is the same. Source: _starting_state_dict in datasets/iterable_dataset.py is kept while the epoch's number is. Who is
# hurt: whoever resumes a stream without shuffling it and trains on for some epochs, or evaluates from it twice.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "${FINDINGS_PY:-}" ]; then
  py=$FINDINGS_PY
else
  python3 -m venv "$work/venv"
  py=$work/venv/bin/python
  "$py" -m pip install -q --disable-pip-version-check datasets==5.2.0 torch==2.13.0 numpy==2.4.6
fi
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
cat > "$work/check.py" <<'PY'
import datasets
from datasets import Dataset
from torch.utils.data import DataLoader

datasets.disable_progress_bars()


def stream():
    return Dataset.from_dict({"i": list(range(8))}).to_iterable_dataset(num_shards=2)


def state_after(rows):
    data = stream()
    iterator = iter(data)
    for _ in range(rows):
        next(iterator)
    list(iterator) if rows == 8 else None
    return data.state_dict()


resumed = stream()
resumed.load_state_dict(state_after(5))
passes = [[row["i"] for row in resumed] for _ in range(3)]
print("three passes after resuming at row 5:", passes)
assert passes == [[5, 6, 7]] * 3
resumed.set_epoch(1)
assert [row["i"] for row in resumed] == list(range(8))

loaded = stream()
loaded.load_state_dict(state_after(5))
loader = DataLoader(loaded, batch_size=None)
assert [[row["i"] for row in loader] for _ in range(2)] == [[5, 6, 7]] * 2

ended = stream()
ended.load_state_dict(state_after(8))
passes = [[row["i"] for row in ended] for _ in range(2)]
print("two passes after resuming at the end:", passes)
assert passes == [[], []]
PY
cd "$work"
"$py" check.py
