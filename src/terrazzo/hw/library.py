"""What the libraries behind PyTorch's ops reach on a GPU: one record for each family of ops.

The numbers are fractions of the rates of the data sheet (`Gpu.roof`), so that one record serves all machines. They are
fitted to what was measured on an H200 (torch 2.11, cuBLAS 13.1, cuDNN 9.19, CUDA graphs; 20 and 21 November 2026) where
it does not say otherwise. On other machines nothing was measured. Products of 16-bit elements have no record: ours run
at the library's speed (docs/performance.md: 1.00 of cuBLAS in the geometric mean).
"""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.hw.gpu import Gpu


@dataclass(frozen=True)
class Reach:
    """What a family of ops reaches: `arithmetic` is a fraction of the data sheet's rate `on` f32, tf32 or 16 bits,
    `memory` one of its memory's; `latency` is in nanoseconds. Products are counted in whole tiles of `tile` rows and
    columns (channels, for a convolution). `source` is what the numbers were fitted to.
    """

    on: str
    arithmetic: float
    memory: float
    latency: float
    tile: int
    source: str


REACH: dict[tuple[str, str], Reach] = {
    ("product", "f32"): Reach(
        "f32", 0.75, 0.35, 10000, 64,
        "cuBLAS without TF32: 50 TFLOP/s at 4096 x 4096 x 4096, 62.4 us at 1024, 97.5 us at 512 x 2048 x 2048; 20.8 us "
        "at 32 x 2048 x 2048, whose 32 rows cost what 64 do; 2.6 ms for results of 4.3 GB, and 0.65 for 1.1, of sums "
        "of 32 products",
    ),
    ("product", "tf32"): Reach("tf32", 0.80, 0.6, 5000, 64, "cuBLAS with TF32: 403 TFLOP/s at 4096, 12.8 us at 1024"),
    ("convolution", "16"): Reach(
        "16", 0.40, 0.60, 5000, 32,
        "cuDNN, channels last: 27.1 us at 32 x 64 x 56 x 56, 3x3; 22.8 us at 1x1, 256 to 64 channels; 20.1 us at "
        "512 x 7 x 7; 225 us at 3 x 224 x 224, 7x7, whose 3 channels cost what 32 do",
    ),
    ("convolution in 3d", "16"): Reach(
        "16", 0.22, 0.60, 5000, 32,
        "cuDNN (28 November 2026): 353 us at 32 x 64 x 32 x 32 x 32, 5x5x5 with a stride of 2, to 32 channels, 226 for "
        "its image's gradient, 460 for its weights'; transposed, 636 at 8 x 3 x 24 x 24 x 24, 5x5x5, to 128, 473, 930; "
        "0.16, 0.25, 0.12, 0.18, 0.24 and 0.12 of the rate",
    ),
    ("forward in 3d", "f32"): Reach(
        "f32", 0.28, 0.60, 5000, 1,
        "cuDNN (28 November 2026): from 3 to 64 channels 1.85 ms at 16 x 64 x 64 x 64, 3x3x3, 9.93 at 3x5x7, 4.89 at "
        "8 x 16 x 128 x 128, 3x5x7",
    ),
    ("transposed in 3d", "f32"): Reach("f32", 0.11, 0.60, 5000, 4, "41.2 ms at 16 x 32 x 32 x 32 x 32, 5x5x5, to 64"),
    ("transposed in 3d", "tf32"): Reach(
        "tf32", 0.06, 0.60, 5000, 16,
        "9.0 ms at 8 x 48 x 64 x 64 x 64, 3x3x3, to 48 channels, 35.7 at 16 x 32 x 64 x 64 x 64, 3x5x5, to 64, 29.2 at "
        "8 x 48 x 96 x 96 x 96, 3x3x3, to 24, 1.8 at 4 x 32 x 32 x 64 x 128, 3x3x3 with a stride of 2, to 32",
    ),
    ("convolution", "f32"): Reach(
        "f32", 0.47, 0.60, 5000, 32,
        "cuDNN without TF32, on an H100 (27 November 2026): 253 us at 32 x 256 x 14 x 14, 3x3, 256 at 64 x 56 x 56, "
        "1015 at 4 x 320 x 64 x 64, 1305 at 8 x 256 x 64 x 64; 118 at 1x1, 256 to 1024 channels, 14 x 14",
    ),
    ("convolution", "tf32"): Reach(
        "tf32", 0.52, 0.75, 5000, 32,
        "the same with TF32, with images turned: 48, 90, 162 and 212 us; 34 at 1x1, and 3.52 ms for 12.9 GB",
    ),
    ("forward in rows", "tf32"): Reach(
        "tf32", 0.20, 0.30, 5000, 16,
        "large images as they lie, with nothing turned (28 November 2026): 6.73 ms at 16 x 16 x 1024 x 1024, 3x3, to "
        "128 channels, 2.33 at 32 x 64 x 131072, 3, to 128, 9.87 at 64 x 64 x 524280, 3 with a stride of 3, to 128",
    ),
    ("image turned", "tf32"): Reach("f32", 1.0, 0.45, 0, 1, "as in 16 bits; fits 380 us at 8 x 64 x 224 x 224, 3x3"),
    ("image turned", "16"): Reach(
        "f32", 1.0, 0.45, 0, 1,
        "cuDNN's kernels that bring channels to the end and back: 78.5 us for 103 MB, 49.5 for 51, 38.0 for 38, 10.0 "
        "for 9.6 (24 November 2026)",
    ),
    ("bias", "16"): Reach(
        "f32", 1.0, 0.29, 0, 1, "an addition by itself: 79.2 us for results of 51 MB, 26.2 for 19, 14.1 for 9.6"
    ),
    ("bias", "f32"): Reach("f32", 1.0, 0.52, 0, 1, "the same: 81.5 us for 103 MB, 30.2 for 39"),
    ("depthwise", "16"): Reach(
        "f32", 0.049, 0.60, 5000, 1,
        "PyTorch's own kernels, channels first: 445 us at 16 x 256 x 56 x 56, 7x7; 630 us for the 13 of MobileNet v1 "
        "(32 images) and 757 us for the 17 of v2, 3x3",
    ),
    ("depthwise", "f32"): Reach("f32", 0.049, 0.60, 5000, 1, "not measured: as in 16 bits, which they convert"),
    ("depthwise last", "16"): Reach(
        "f32", 0.138, 0.42, 3000, 1,
        "cuDNN, channels last: 220 us for the 5 of a ConvNeXt (32 images, 7x7), 135 us for the 8 of SegFormer b0 (8 "
        "images of 512 x 512, 3x3)",
    ),
    ("depthwise last", "f32"): Reach("f32", 0.138, 0.42, 3000, 1, "not measured: as in 16 bits"),
    ("scan", "any"): Reach(
        "f32", 1.36e-3, 0.40, 5000, 1,
        "PyTorch's own kernel for rows: 179 us at 4096 x 4096, 211 at 256 x 65536, as many in 16 bits (22 November "
        "2026)",
    ),
    ("scan of one row", "any"): Reach("f32", 1.0, 0.48, 5000, 1, "CUB: 58.6 us for 16.8 million elements"),
    ("scan of one row", "16"): Reach("f32", 1.0, 0.19, 5000, 1, "CUB: 75.9 us for 16.8 million elements"),
    ("log scan", "any"): Reach("f32", 0.85e-3, 0.40, 5000, 1, "as scans: 280 us at 4096 x 4096, 382 at 256 x 65536"),
    ("log scan of one row", "any"): Reach("f32", 1.0, 0.12, 5000, 1, "CUB: 152 us for 16.8 million, 199 in 16 bits"),
    ("scan of columns", "any"): Reach(
        "f32", 3.7e-8, 0.40, 5000, 1,
        "PyTorch's own kernel, in which a thread takes one step after the other: 1545 us for 4096 steps of 4096 "
        "columns, 219 for 512 of 32768, 160 for 320 of 102400",
    ),
    ("scatter", "any"): Reach(
        "f32", 0.98e-3, 0.69, 3000, 1,
        "258 us to add 4096 x 4096 elements to as many, 63.4 us to write 5 x 5120 of 5120 x 5120",
    ),
    ("scatter of rows", "any"): Reach(
        "f32", 4.5e-3, 0.69, 3000, 1,
        "that add, each element of a row beside the other (30 November 2026): 116 us for 40960 of 1024 to 512, 126 for "
        "16384 of 2048 to 8192, 28 for 16384 of 512 to 2048, 33 for 163840 of 64 to 8192; 157, 140, 37 and 45 in 16 "
        "bits",
    ),
    ("scatter with", "any"): Reach(
        "f32", 0.5e-3, 0.36, 5000, 1, "512 us for 4096 x 4096 of as many, 119 to 124 for 5 x 5120 of 5120 x 5120"
    ),
    ("index add", "any"): Reach(
        "f32", 0.95e-3, 0.30, 3000, 1,
        "193 us for 32768 rows of 512, 241 for 65536 to few, 443 for the 5120 columns of 5120 x 5120",
    ),
    ("index put", "any"): Reach("f32", 1.0, 0.60, 5000, 1, "not measured: a copy, and a kernel that writes"),
    ("index put added", "any"): Reach(
        "f32", 3.3e-5, 0.35, 40000, 1,
        "at least eight kernels, which sort the places first: 39 to 44 us for 2401 and 4096 rows of 3 to 24, 75 for "
        "38809 of 12, in both types (29 November 2026); 53 for 4096 of 256, 79 for 16384 of 512, 74 for 65536 of 8, "
        "131 for 163840 of 64, 137 for 8192 of 4096, 158 for 65536 of 512, 209 for 40960 of 1024 (30 November 2026)",
    ),
    ("embedding gradient", "any"): Reach(
        "f32", 1.0, 0.10, 14000, 1,
        "zeros, and a kernel that adds: 15 us for 512 rows of 768 to a table of 512, 49 for 2048, 23 and 86 where the "
        "table has two (29 November 2026)",
    ),
    ("embedding gradient sorted", "any"): Reach(
        "f32", 3.0e-5, 0.20, 95000, 1,
        "more than 3072 rows, which are sorted first, in both types alike (30 November 2026): 102 us for 4096 rows of "
        "256 to 10000, 122 for 16384 of 512 to 2048, 129 for 163840 of 64 to 8192, 166 for 40960 of 1024 to 512, 176 "
        "for 65536 of 8 to as many, 196 for 65536 of 512 to 8192, 201 for 8192 of 4096 to 1024, 376 for 16384 of 2048 "
        "to 8192",
    ),
    ("cat", "any"): Reach(
        "f32", 1.0, 0.80, 3000, 1, "54.6 us for 24 tensors of 8192 x 128, 36.4 for 16 of 1024 x 1024, 22.1 in 16 bits"
    ),
    ("masked scatter", "any"): Reach("f32", 1.0, 0.24, 10000, 1, "296 us for 5120 x 5120 elements"),
    ("sort", "any"): Reach(
        "f32", 4.7e-4, 1.0, 8500, 1,
        "409 us for 65536 rows of 64, 427 of 128, 1547 of 256, 2136 of 1024, 31 and 149 for 4096 of 64 and 1024; a few "
        "rows 8 to 9, from 256 on 20 (30 November 2026)",
    ),
    ("sort", "16"): Reach("f32", 7e-4, 1.0, 8500, 1, "241, 258, 978 and 1365 us for the same 65536 rows"),
    ("topk", "any"): Reach(
        "f32", 3.4e-4, 1.0, 8500, 1,
        "253 us for 65536 rows of 64, 805 of 256, 1829 of 512, two or eight of each; 21 and 57 for 4096 rows of 64 and "
        "256; a few rows 8 to 14 (30 November 2026)",
    ),
    ("kth value", "any"): Reach(
        "f32", 4.2e-4, 1.0, 3500, 1,
        "179 us for 65536 rows of 64, 651 of 256, medians 164 and 573; 13 and 43 for 4096 rows (30 November 2026)",
    ),
    ("special", "f32"): Reach("f32", 1.0, 0.55, 5000, 1, "digamma of 4096 x 8192: 263 us, erfinv: 69"),
    ("special", "16"): Reach("f32", 1.0, 0.40, 5000, 1, "the same in bfloat16: 264 us, 39"),
    ("pooling", "f32"): Reach("f32", 1.0, 0.40, 5000, 1, "not measured: as scans"),
    ("pooling", "16"): Reach("f32", 1.0, 0.40, 5000, 1, "not measured: as scans"),
}  # fmt: skip

MARGIN = 1.25
"""A library is called where ours takes so many times as long by the model: neither price is better known than that."""


def reach(family: str, dtype: str, tf32: bool = False) -> Reach | None:
    """The record for a family of ops on elements of this type, in TF32 if that is allowed; None where there is none."""
    kind = "16" if dtype in ("f16", "bf16") else dtype
    first = REACH.get((family, "tf32" if tf32 and kind == "f32" else kind))
    return first or REACH.get((family, kind)) or REACH.get((family, "any"))


def price(found: Reach, gpu: Gpu, operations: float, moved: int) -> float:
    """Nanoseconds for an op that computes so many operations, in whole tiles, and moves so many bytes."""
    memory, fma, tensor = gpu.roof
    rate = {"f32": fma, "16": tensor, "tf32": tensor / 2 if gpu.number >= 80 else fma}[found.on]
    return max(operations / (found.arithmetic * rate), moved / (found.memory * memory)) + found.latency
