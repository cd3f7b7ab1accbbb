"""Which GPUs a CUDA module has code for: real fat binaries, of CUDA 12.4 and 13.0, and every kind of damage to them.

`data/make.sh` made the real ones. Where a toolkit is at hand, its `cuobjdump` has to say the same.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import run_ok

from swarmkv_ll import elf
from swarmkv_ll.cache import cache_dir
from swarmkv_ll.errors import BinaryFormatError
from swarmkv_ll.fatbin import Code, code_in, gpu_code

DATA = Path(__file__).resolve().parent / "data"
BARE, OBJECT = DATA / "cuda12.fatbin", DATA / "cuda13.obj"

IN_BARE: Code = {("elf", "61"): 2, ("elf", "90a"): 1, ("ptx", "61"): 1, ("ptx", "90a"): 1}
IN_OBJECT: Code = {("elf", "75"): 1, ("elf", "120f"): 1, ("ptx", "100f"): 1}

HEADER, ENTRY = 0, 16
"""Where the header of the bare fat binary and that of its first entry are."""


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def shared_library(folder: Path, *fatbins: Path, padding: int = 8, options: tuple[str, ...] = ()) -> Path:
    """A library with these in its `.nv_fatbin` section, zeros between them, as the linker puts a module's together."""
    parts = "".join(f'.incbin "{path}"\n.balign {padding}\n' for path in fatbins)
    source = write(folder / "code.s", f'.section .nv_fatbin, "a"\n.balign 8\n{parts}'.encode())
    made = folder / "module.so"
    subprocess.run(["gcc", "-shared", "-nostdlib", *options, str(source), "-o", str(made)], check=True)
    return made


needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to make a library with")


# ── right ones ───────────────────────────────────────────────────────────────────────────────────────


def test_a_bare_fat_binary_of_cuda_12() -> None:
    assert gpu_code(BARE) == IN_BARE
    assert list(gpu_code(BARE)) == list(IN_BARE)  # in order


def test_a_relocatable_object_of_cuda_13() -> None:
    """Its section is `__nv_relfatbin`, and its architectures have an `f`."""
    assert gpu_code(OBJECT) == IN_OBJECT


@needs_gcc
@pytest.mark.parametrize("padding", [8, 16, 4096])
def test_a_library_with_many_fat_binaries(tmp_path: Path, padding: int) -> None:
    found = gpu_code(shared_library(tmp_path, *[BARE] * 5, padding=padding))
    assert found == {key: 5 * n for key, n in IN_BARE.items()}


def test_it_is_not_read_into_memory(tmp_path: Path) -> None:
    """One entry of 300 MB, in a file that has no blocks on the disk for them."""
    n = 300 << 20
    data = bytearray(BARE.read_bytes()[: ENTRY + 64])
    struct.pack_into("<Q", data, HEADER + 8, 64 + n)
    struct.pack_into("<IQ", data, ENTRY + 4, 64, n)
    path = write(tmp_path / "large", data)
    os.truncate(path, len(data) + n)
    tracemalloc.start()
    try:
        assert gpu_code(path) == {("elf", "61"): 1}
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def cuobjdump() -> str | None:
    found = shutil.which("cuobjdump")
    return found or next((str(path) for path in sorted(cache_dir().glob("cuda*/**/bin/cuobjdump"))), None)


@needs_gcc
@pytest.mark.skipif(cuobjdump() is None, reason="no cuobjdump, on the path or in an assembled toolkit")
def test_cuobjdump_says_the_same(tmp_path: Path) -> None:
    """It names the files it would extract: `ELF file    1: module.1.sm_61.cubin`, PTX too as sm."""
    for path, of_one, n in [(BARE, IN_BARE, 1), (shared_library(tmp_path, *[BARE] * 3), IN_BARE, 3)]:
        listed = [
            subprocess.run([str(cuobjdump()), what, str(path)], capture_output=True, text=True, check=True).stdout
            for what in ("--list-elf", "--list-ptx")
        ]
        for (kind, architecture), times in of_one.items():
            assert listed[kind == "ptx"].count(f".sm_{architecture}.") == times * n
        assert sum(text.count(" file ") for text in listed) == n * sum(of_one.values())
        assert gpu_code(path) == {key: times * n for key, times in of_one.items()}


# ── the command ──────────────────────────────────────────────────────────────────────────────────────


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "swarmkv_ll.fatbin"]
    home = Path(elf.__file__).parent.parent
    done = subprocess.run([*command, str(BARE)], cwd=home, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("elf 61 2\nelf 90a 1\nptx 61 1\nptx 90a 1\n", "")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("link")
    damaged = write(tmp_path / "damaged", BARE.read_bytes()[:-1])
    for wrong in (tmp_path / "absent", tmp_path, tmp_path / "pipe", tmp_path / "link", Path("/dev/zero"), damaged):
        done = subprocess.run([*command, str(wrong)], cwd=home, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
        assert str(wrong) in done.stderr
    wrong = write(tmp_path / "a\nb\x1b[2J", b"damaged")
    done = subprocess.run([*command, str(wrong)], cwd=home, capture_output=True, text=True, check=False)
    assert "a b\ufffd[2J: not an ELF file" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_it_needs_nothing_installed() -> None:
    run_ok(
        """
        import sys
        for name in ("numpy", "cffi", "_cffi_backend"):
            sys.modules[name] = None
        from swarmkv_ll.fatbin import gpu_code
        assert gpu_code(sys.argv[1])
        """,
        BARE,
    )


# ── damaged ones ─────────────────────────────────────────────────────────────────────────────────────


def refusal(path: Path) -> BinaryFormatError:
    with pytest.raises(BinaryFormatError) as caught:
        gpu_code(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("whole", [BARE, OBJECT], ids=lambda path: path.name)
def test_truncated_anywhere(tmp_path: Path, whole: Path) -> None:
    data = whole.read_bytes()
    for n in range(len(data)):
        with pytest.raises(BinaryFormatError):
            code_in(data[:n])
    refusal(write(tmp_path / "file", data[: len(data) // 2]))


@pytest.mark.parametrize(
    ("offset", "layout", "value", "words", "at"),
    [
        (HEADER, "<I", 0xBA55ED51, "not an ELF file, begins with 51ed55ba", 0),
        (HEADER + 4, "<H", 2, "fat binary of version 2 with a header of 16 bytes", 0),
        (HEADER + 6, "<H", 8, "fat binary of version 1 with a header of 8 bytes", 0),
        (HEADER + 8, "<Q", 2961, "fat binary of 2961 bytes, 2960 are left", 0),
        (HEADER + 8, "<Q", 2**64 - 1, f"fat binary of {2**64 - 1} bytes, 2960 are left", 0),
        (HEADER + 8, "<Q", 2959, "entry of 72 + 696 bytes, 767 are left", 2208),
        (HEADER + 8, "<Q", 0, "0x01010002 where a fat binary's magic 0xba55ed50 should be", 16),
        (ENTRY, "<H", 77, "entry of kind 77 and version 0x101", 16),
        (ENTRY, "<H", 0, "entry of kind 0 and version 0x101", 16),
        (ENTRY + 2, "<H", 0x102, "entry of kind 2 and version 0x102", 16),
        (ENTRY + 4, "<I", 63, "entry of 63 + 696 bytes, 2960 are left", 16),
        (ENTRY + 4, "<I", 2**32 - 1, f"entry of {2**32 - 1} + 696 bytes, 2960 are left", 16),
        (ENTRY + 4, "<I", 73, "entry of kind 256 and version 0x5801", 785),
        (ENTRY + 8, "<Q", 2**64 - 1, f"entry of 72 + {2**64 - 1} bytes, 2960 are left", 16),
        (ENTRY + 8, "<Q", 0, "entry of kind", 88),
        (ENTRY + 8, "<Q", 2880, "8 bytes where an entry's header of 64 should be", 2968),
        (ENTRY + 28, "<I", 0, "entry for architecture 0", 16),
        (ENTRY + 28, "<I", 2**32 - 1, f"entry for architecture {2**32 - 1}", 16),
    ],
)
def test_a_wrong_field(tmp_path: Path, offset: int, layout: str, value: int, words: str, at: int) -> None:
    data = bytearray(BARE.read_bytes())
    struct.pack_into(layout, data, offset, value)
    error = refusal(write(tmp_path / "file", data))
    assert words in str(error)
    assert error.offset == at


@pytest.mark.parametrize(
    ("offset", "layout", "value", "words"),
    [
        (4, "<B", 1, "ELF class 1 and byte order 1"),
        (5, "<B", 2, "ELF class 2 and byte order 2"),
        (40, "<Q", 2**64 - 1, f"section headers at offset {2**64 - 1}"),
        (58, "<H", 40, "section headers of 40 bytes"),
        (60, "<H", 0, "0 section headers"),
        (60, "<H", 2**16 - 1, "65535 section headers"),
        (62, "<H", 0, "names in section 0"),
        (62, "<H", 2**16 - 1, "names in section 65535"),
    ],
)
def test_a_wrong_field_of_the_object_around_it(
    tmp_path: Path, offset: int, layout: str, value: int, words: str
) -> None:
    data = bytearray(OBJECT.read_bytes())
    struct.pack_into(layout, data, offset, value)
    assert words in str(refusal(write(tmp_path / "file", data)))


def test_bytes_after_a_fat_binary(tmp_path: Path) -> None:
    data = BARE.read_bytes()
    assert gpu_code(write(tmp_path / "zeros", data + bytes(9))) == IN_BARE
    error = refusal(write(tmp_path / "short", data + b"\0\0\1"))
    assert error.offset == len(data) + 2
    assert "0x12345678 where a fat binary's magic" in str(
        refusal(write(tmp_path / "other", data + struct.pack("<IIQ", 0x12345678, 0, 0)))
    )


def test_no_gpu_code(tmp_path: Path) -> None:
    assert "no GPU code in it" in str(refusal(Path(sys.executable).resolve()))
    assert "no GPU code in it" in str(refusal(write(tmp_path / "none", struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 0))))
    assert "begins with nothing" not in str(refusal(write(tmp_path / "empty", b"")))


def test_sections_that_overlap_are_not_read_again_and_again(tmp_path: Path) -> None:
    """60,000 sections that are each the whole file would take hours."""
    n = 60_000
    names = b"\0.nv_fatbin\0"
    size = 64 + 64 * n + len(names)
    head = b"\x7fELF\x02\x01\x01".ljust(40, b"\0") + struct.pack("<QIHHHHHH", 64, 0, 64, 0, 0, 64, n, n - 1)
    every = struct.pack("<IIQQQQIIQQ", 1, 1, 0, 0, 0, size, 0, 0, 8, 0) * (n - 1)
    last = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, size - len(names), len(names), 0, 0, 1, 0)
    assert "overlap" in str(refusal(write(tmp_path / "file", head + every + last + names)))


@pytest.mark.parametrize("whole", [BARE, OBJECT], ids=lambda path: path.name)
def test_any_byte_changed(whole: Path) -> None:
    """It is read, or refused with the one error."""
    data = bytearray(whole.read_bytes())
    refused = 0
    for i, true in enumerate(data):
        for value in (0, 0xFF, true ^ 1):
            data[i] = value
            try:
                assert code_in(bytes(data))
            except BinaryFormatError:
                refused += 1
        data[i] = true
    assert refused > 100


def test_random_bytes() -> None:
    """Behind each beginning that lets them in, and over a stretch of a real file."""
    draw = random.Random(61)
    bare, made = BARE.read_bytes(), OBJECT.read_bytes()
    for i in range(3000):
        noise = draw.randbytes(draw.randrange(200))
        begin = draw.choice([b"", bare[:4], bare[:8], bare[:16], bare[:80], made[:16], made[:40], made[:64]])
        whole = bytearray(draw.choice([bare, made]))
        at = draw.randrange(len(whole))
        whole[at : at + len(noise)] = noise
        for data in (begin + noise, bytes(whole)):
            with suppress(BinaryFormatError):
                assert code_in(data), i


# ── what else is read of a library ───────────────────────────────────────────────────────────────────


@needs_gcc
def test_build_id_and_needs(tmp_path: Path) -> None:
    write(tmp_path / "empty.s", b"")
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-nostdlib",
            "-Wl,-soname,libneeded.so.12",
            tmp_path / "empty.s",
            "-o",
            tmp_path / "libneeded.so",
        ],
        check=True,
    )
    options = ("-Wl,--build-id=0x00ff61", "-Wl,--no-as-needed", f"-L{tmp_path}", "-lneeded", "-lc")
    path = shared_library(tmp_path, BARE, options=options)
    with elf.mapped(path) as data:
        assert elf.build_id(data) == "00ff61"
        assert elf.needed(data) == ["libneeded.so.12", "libc.so.6"]
    with elf.mapped(shared_library(tmp_path, BARE, options=("-Wl,--build-id=none",))) as data:
        assert elf.build_id(data) is None
        assert elf.needed(data) == []


@needs_gcc
@pytest.mark.parametrize("byte", [b"\n", b"\x1b", b"\xff"])
def test_a_needed_name_that_is_none(tmp_path: Path, byte: bytes) -> None:
    path = shared_library(tmp_path, BARE, options=("-Wl,--no-as-needed", "-lc"))
    data = path.read_bytes().replace(b"libc.so.6", b"lib" + byte + b".so.6")
    with pytest.raises(BinaryFormatError, match=r"the needed library's name at offset .* is damaged"):
        elf.needed(data)


def test_an_error_of_what_is_done_with_a_file_is_not_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another"), elf.mapped(BARE):
        raise ValueError("another")
    with pytest.raises(BinaryFormatError, match="empty: the file is empty"), elf.mapped(write(tmp_path / "empty", b"")):
        pass


@needs_gcc
def test_build_id_and_needs_of_damaged_libraries(tmp_path: Path) -> None:
    path = shared_library(tmp_path, BARE, options=("-Wl,--build-id=sha1", "-Wl,--no-as-needed", "-lc", "-lm"))
    whole = path.read_bytes()
    draw = random.Random(12)
    found = 0
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 40)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        with suppress(BinaryFormatError):
            elf.build_id(bytes(data))
            found += len(elf.needed(bytes(data)))
    assert found > 100
