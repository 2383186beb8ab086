"""Removes the machine code for GPUs from a shared library, so that it packs small.

CUDA's compiler puts a row of containers into section .nv_fatbin, each with one entry per GPU generation. The entries'
code is overwritten with zeros. Headers stay, so the library loads as before. For a GPU that the library has no code
for, nothing changes.
"""

import mmap
import struct
from pathlib import Path

_CONTAINER = struct.Struct("<IHHQ")  # magic number, version, size of this header, size of the entries
_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct("<HHIQ")  # kind, version, size of this header, size of the code
_MACHINE_CODE = 2


def section(elf, name: bytes) -> tuple:
    """Offset and size of a section of a 64-bit ELF file, little-endian."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    strings = headers[names][4]
    for header in headers:
        start = strings + header[0]
        if elf[start : start + len(name) + 1] == name + b"\0":
            return header[4], header[5]
    raise ValueError(f"there is no section {name.decode()}")


def blank(library: Path) -> int:
    """Overwrite the code in place; returns the number of bytes."""
    with open(library, "r+b") as file, mmap.mmap(file.fileno(), 0) as elf:
        position, size = section(elf, b".nv_fatbin")
        end, blanked = position + size, 0
        while position + _CONTAINER.size <= end:
            magic, _, header, entries = _CONTAINER.unpack_from(elf, position)
            if magic != _MAGIC:
                position += 8
                continue
            entry, position = position + header, position + header + entries
            while entry < position:
                kind, _, header, code = _ENTRY.unpack_from(elf, entry)
                if kind == _MACHINE_CODE:
                    elf[entry + header : entry + header + code] = bytes(code)
                    blanked += code
                entry += header + code
        return blanked
