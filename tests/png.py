"""PNG files with any header, which Pillow would not write."""

import struct
import zlib


def png(
    width: int, height: int, *, color: int = 2, bits: int = 8, rows: bytes = b"", transparent: bytes = b""
) -> bytes:
    """Return a file of this size, of RGB unless `color` is another type; `rows` begin with their filter types, and
    `transparent` is the content of a tRNS chunk."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    key = chunk(b"tRNS", transparent) if transparent else b""
    parts = (chunk(b"IHDR", header), key, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
