#!/usr/bin/env bash
# safetensors==0.8.0, torch==2.13.0. Expected: save_file({"z": z.conj()}) stores the conjugate, or refuses it as it does
# views that are not contiguous. Real: torch conjugates lazily (a bit on the tensor, memory shared), the writer reads
# the memory, and z comes back instead of its conjugate; so does a buffer or a parameter that was made from one.
# torch.save, .clone() and resolve_conj() are right. Nothing warns. Source: _flatten_as_ptr in safetensors/torch.py
# hands on the address of the data and does not look at is_conj(). Who is hurt: whoever stores complex weights or
# buffers: rotary frequencies of the inverse rotation, spectral filters.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "${FINDINGS_PY:-}" ]; then
  py=$FINDINGS_PY
else
  python3 -m venv "$work/venv"
  py=$work/venv/bin/python
  "$py" -m pip install -q --disable-pip-version-check safetensors==0.8.0 torch==2.13.0 numpy==2.4.6
fi
export OMP_NUM_THREADS=1
cat > "$work/check.py" <<'PY'
import torch
from safetensors.torch import load_file, save_file

z = torch.polar(torch.ones(4), torch.arange(4.0))


def back(tensor):
    save_file({"z": tensor}, "z.safetensors")
    return load_file("z.safetensors")["z"]


conj = z.conj()
for name, tensor in {"z.conj()": conj, "a parameter": torch.nn.Parameter(conj).detach()}.items():
    loaded = back(tensor)
    imag, found = tensor.imag.flatten(), loaded.imag.flatten()
    print(f"{name}: imaginary parts {[round(x, 2) for x in imag.tolist()]}, loaded {[round(x, 2) for x in found.tolist()]}")
    assert not torch.equal(loaded, tensor) and torch.equal(found, -imag)
assert torch.equal(back(conj.resolve_conj()), conj) and torch.equal(back(conj.clone()), conj)
torch.save(conj, "z.pt")
assert torch.equal(torch.load("z.pt"), conj)
PY
cd "$work"
"$py" check.py
