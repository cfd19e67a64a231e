#!/usr/bin/env python3
"""Helps install_peers.sh with a package that cannot be installed with its requirements.

usage: peer_requirements.py PACKAGE [LEFT_OUT...]          the requirements of an installed PACKAGE on this machine, one a line
       peer_requirements.py --alias PACKAGE NAME VERSION   a metadata entry NAME VERSION beside PACKAGE's, for code that asks for it
"""
import importlib.metadata
import os
import sys


def requirements(package, left_out):
    from pip._vendor.packaging.requirements import Requirement
    for text in importlib.metadata.requires(package) or ():
        need = Requirement(text)
        if need.name not in left_out and (need.marker is None or need.marker.evaluate({"extra": ""})):
            need.marker = None
            yield str(need)


def alias(package, name, version):
    beside = os.path.dirname(importlib.metadata.distribution(package)._path)  # noqa: SLF001 (no public way to the folder)
    folder = os.path.join(beside, f"{name}-{version}.dist-info")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "METADATA"), "w", encoding="utf-8") as f:
        f.write(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    with open(os.path.join(folder, "INSTALLER"), "w", encoding="utf-8") as f:
        f.write("kvgate\n")


def main():
    if len(sys.argv) == 5 and sys.argv[1] == "--alias":
        alias(*sys.argv[2:])
    elif len(sys.argv) > 1:
        print("\n".join(requirements(sys.argv[1], sys.argv[2:])))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
