"""Situations (d): half precision as NumPy arrays, from files, compared."""

import tempfile
import warnings
from pathlib import Path

import torch
from half import Cap, Fp32, Sdpa, make
from oracle import COUNT, Core, situation

import regard


def extra(seen, model):
    bad = []
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as d:
        warnings.simplefilter("ignore")
        seen.save(Path(d) / "x.regard")
        again = regard.open(Path(d) / "x.regard")
        for name, other in (("numpy", seen.to("numpy")), ("file", again),
                            ("file numpy", again.to("numpy"))):  # fmt: skip
            for a, b in zip(seen.records, other.records, strict=True):
                x, y = torch.as_tensor(a.weights()), torch.as_tensor(b.weights())
                if y.isnan().any():
                    n = int(y.isnan().any(-1).sum())
                    bad.append(f"{name} {a.name}: {n} rows are NaN, were {a.q.dtype}")
                elif (x.double() - y.double()).abs().max() > 1e-5:
                    bad.append(f"{name} {a.name}: differs")
            if str(other.table()) != str(seen.table()):
                bad.append(f"{name}: the table differs")
        for a, x in zip(seen.layers, seen.attentions, strict=True):
            if torch.as_tensor(x).isnan().any():
                bad.append(f"attentions {a}: NaN")
    return bad


def main():
    for core in (Core, Fp32, Sdpa, Cap):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            name = f"arrays {core.__name__} {str(dtype)[6:]}"
            tol = 0.1 if dtype is not torch.float32 else None
            situation(name, make(core(), dtype, steps=3), tol=tol, extra=extra)
    print(COUNT)


if __name__ == "__main__":
    main()
