"""Large files, written past the page cache, hashed and read back.

Nothing here imports perdure, and modules name each other relatively: the writer process loads this
folder as a package of its own, so that it starts in a fraction of a second.
"""

from .blocks import ALIGNMENT, CHUNK_BYTES, aligned, chunk_buffer, huge_pages, no_progress
from .reading import Room, check_image, open_past_cache, read_piece
from .sums import ChunkSums
from .writing import write_blocks, write_image, write_parts

__all__ = [
    "ALIGNMENT",
    "CHUNK_BYTES",
    "ChunkSums",
    "Room",
    "aligned",
    "check_image",
    "chunk_buffer",
    "huge_pages",
    "no_progress",
    "open_past_cache",
    "read_piece",
    "write_blocks",
    "write_image",
    "write_parts",
]
