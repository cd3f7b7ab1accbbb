"""Which GPUs a CUDA module has code for, read from the module itself, without CUDA.

    python -m swarmkv_ll.fatbin FILE

prints a line for each kind and architecture, `elf 61 144`: machine code (`elf`), PTX that the driver compiles when
it loads it (`ptx`), or code that waits for the linker (`lto`), for compute capability 6.1, 144 pieces.

A fat binary is a header (u32 magic, u16 version, u16 size of the header, u64 size of what follows) and entries. An
entry's header: u16 kind, u16 version, u32 size of the header, u64 size of the code; the architecture as u32 at 28, and
flags as u64 at 40, where bit 20 makes it 90a and bit 21 makes it 100f. Found by comparing what nvcc and fatbinary of
CUDA 12.4 and 13.0 write for each option. Object files and libraries hold many, in a section, zeros between them.
"""

from __future__ import annotations

import re
import struct
import sys
from collections import Counter
from os import PathLike

from .elf import Data, mapped, sections
from .errors import BinaryFormatError
from .printable import one_line

MAGIC = 0xBA55ED50
SECTIONS = (".nv_fatbin", "__nv_relfatbin")
"""What nvcc calls the section: in linked code, and in objects made with `-dc`."""

_FATBIN = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ12xI8xQ")
_ENTRY_SIZE = 64
_KINDS = {1: "ptx", 2: "elf", 8: "lto"}
_EXACT, _FAMILY = 1 << 20, 1 << 21
_NOT_ZERO = re.compile(rb"[^\0]")

Code = dict[tuple[str, str], int]
"""How many pieces of code there are, by kind (`elf`, `ptx`, `lto`) and architecture (`61`, `90a`, `100f`)."""


def gpu_code(path: str | PathLike[str]) -> Code:
    """What GPU code a file holds: a CUDA module, an object file, or a bare fat binary.

    The file is mapped, and of the code only the headers are touched.

    Parameters
    ----------
    path : path

    Returns
    -------
    dict
        Number of pieces by (kind, architecture), `elf` first, architectures in order.

    Raises
    ------
    BinaryFormatError
        The file cannot be read, is damaged, or holds no GPU code.
    """
    with mapped(path) as data:
        return code_in(data)


def code_in(data: Data) -> Code:
    """What GPU code a file's bytes hold; as `gpu_code`."""
    bare = len(data) >= 4 and struct.unpack_from("<I", data) == (MAGIC,)
    places = [(0, len(data))] if bare else sections(data, *SECTIONS)
    found: Counter[tuple[str, str]] = Counter()
    for offset, size in places:
        _read_fatbins(data, offset, offset + size, found)
    if not found:
        raise BinaryFormatError(f"no GPU code in it ({len(places)} sections {' or '.join(SECTIONS)})")
    return {key: found[key] for key in sorted(found, key=lambda key: (key[0], int(key[1].rstrip("af")), key[1]))}


def _read_fatbins(data: Data, at: int, end: int, found: Counter[tuple[str, str]]) -> None:
    while begin := _NOT_ZERO.search(data, at, end):
        at = begin.start()
        if end - at < _FATBIN.size:
            raise BinaryFormatError(f"{end - at} bytes where a fat binary's header of {_FATBIN.size} should be", at)
        magic, version, header_size, size = _FATBIN.unpack_from(data, at)
        if magic != MAGIC:
            raise BinaryFormatError(f"{magic:#010x} where a fat binary's magic {MAGIC:#x} should be", at)
        if version != 1 or header_size != _FATBIN.size:
            raise BinaryFormatError(f"fat binary of version {version} with a header of {header_size} bytes", at)
        if size > end - at - header_size:
            raise BinaryFormatError(f"fat binary of {size} bytes, {end - at - header_size} are left", at)
        stop = at + header_size + size
        at += header_size
        while at < stop:
            at = _read_entry(data, at, stop, found)


def _read_entry(data: Data, at: int, stop: int, found: Counter[tuple[str, str]]) -> int:
    """Count one entry; where the next begins."""
    if stop - at < _ENTRY_SIZE:
        raise BinaryFormatError(f"{stop - at} bytes where an entry's header of {_ENTRY_SIZE} should be", at)
    kind, version, header_size, size, architecture, flags = map(int, _ENTRY.unpack_from(data, at))
    if kind not in _KINDS or version != 0x101:
        raise BinaryFormatError(f"entry of kind {kind} and version {version:#x}, which is not known", at)
    if header_size < _ENTRY_SIZE or header_size + size > stop - at:
        raise BinaryFormatError(f"entry of {header_size} + {size} bytes, {stop - at} are left", at)
    if not 10 <= architecture <= 999:
        raise BinaryFormatError(f"entry for architecture {architecture}", at)
    suffix = "a" if flags & _EXACT else "f" if flags & _FAMILY else ""
    found[_KINDS[kind], f"{architecture}{suffix}"] += 1
    return at + header_size + size


def main(arguments: list[str]) -> int:
    """The command: lines as `elf 61 144`, or one line on standard error and 2."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m swarmkv_ll.fatbin FILE", file=sys.stderr)
        return 2
    try:
        for (kind, architecture), n in gpu_code(arguments[0]).items():
            print(kind, architecture, n)
    except BinaryFormatError as error:
        print(one_line(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
