#!/usr/bin/env bash
# safetensors==0.8.0, numpy==2.4.6. Expected: safetensors.numpy saves the values of an array whatever its layout in
# memory (0.7.0 did), or refuses one that is not contiguous, as safetensors.torch does. Real: the bytes are written in
# the order in which they lie in memory, under the shape of the view: a transposed matrix, or one in Fortran order,
# comes back with its numbers in other places, of the right shape and dtype. Nothing warns. Source: _flatten in
# safetensors/numpy.py hands on the address of the data (the docstring asks for contiguous arrays; nothing checks it).
# Who is hurt: whoever converts weights with `array.T`, as between the (out, in) of a torch Linear and the (in, out) of
# a flax kernel, and upgrades.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "${FINDINGS_PY:-}" ]; then
  py=$FINDINGS_PY
else
  python3 -m venv "$work/venv"
  py=$work/venv/bin/python
  "$py" -m pip install -q --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6
fi
export OMP_NUM_THREADS=1
cat > "$work/check.py" <<'PY'
import os

import numpy as np
from safetensors.numpy import load, load_file, save, save_file

weight = np.arange(6.0, dtype=np.float32).reshape(2, 3)
cases = {"as it is": weight, "transposed": weight.T, "Fortran order": np.asfortranarray(weight)}
right = {}
for name, array in cases.items():
    save_file({"w": array}, "weights.safetensors")
    back = load_file("weights.safetensors")["w"]
    assert back.shape == array.shape and back.dtype == array.dtype
    assert np.array_equal(back, load(save({"w": array}))["w"])
    right[name] = np.array_equal(back, array)
    print(f"{name}: saved {array.tolist()}, loaded {back.tolist()}")
assert right == {"as it is": True, "transposed": False, "Fortran order": False}
assert np.array_equal(load(save({"w": np.ascontiguousarray(weight.T)}))["w"], weight.T)
os.remove("weights.safetensors")
PY
cd "$work"
"$py" check.py
