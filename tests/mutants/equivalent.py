"""Mutants that survive because they are right: they compute the same, and order the same."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Equivalent:
    """Mutants of some kernels by some operators, whose change a pattern finds: why those that survive are not wrong."""

    kernels: tuple[str, ...]
    operators: tuple[str, ...]
    change: str
    reason: str

    def covers(self, kernel: str, operator: str, change: str) -> bool:
        return kernel in self.kernels and operator in self.operators and re.search(self.change, change) is not None


SUMS = ("sum of rows", "argmax", "variance", "cross entropy", "softmax", "layer norm", "rms norm", "attention")
MET = ("sum of columns", "split product", "softmax of columns", "warps share steps")
COPIED = ("chain of keys down", "chain of rows turned", "chain of rows across", "chain through a slot")
HANDED = ("chain through memory", "chain of unlike instructions")
RINGS = (
    *COPIED,
    "linear",
    "split product",
    "matmul of bfloat16",
    "ragged matmul of bfloat16",
    "bmm of half",
    "swiglu",
    "attention",
    "attention of half",
    "conv1d",
    "conv2d",
    "linear through registers",
    "matmul of half",
    "copies for wgmma",
    "warps share steps",
    "warps, staged",
)
BOXES = "transposed matmul of bfloat16"
PREDICATE, BARRIER, MOVED = ("wrong predicate",), ("no barrier",), ("moved barrier",)

FREED = (
    *("roles", "roles, staged", "cluster of m", "cluster of n", "both turned", "three warpgroups", "warps in roles"),
    *("threads in roles", "convolution", "convolution in strides"),
)

CHOSEN = ("transposed matmul of bfloat16", "bmm of half", "swiglu")
PANELS = ("boxes", "boxes in panels", "warpgroups share steps")
CHAINS = ("chain of warps that share keys", "overlapped chain that stays", "chain that stays")
WAVES = (
    *FREED, *PANELS, *CHAINS, "turns", "copies for wgmma", "warps share steps", "warps, staged", "persistent by hand",
)  # fmt: skip

EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent(
        (*FREED, *CHOSEN, *CHAINS, *HANDED),
        ("moved arrive",),
        r"`if (warp % 4 == 0 and )?lane == 0:` -> `(for|if|wait_groups|sync)",
        "a slot is free later than it could be",
    ),
    Equivalent(
        CHOSEN,
        ("no arrive", "moved wait", *PREDICATE),
        r"(`arrive\(empty0\[i3 \* 10 \+ 1\]\)`|`wait_groups\(0, 'wgmma'\)` -> `if warp|"
        r"^line (35|32|31) `if warp % 4 == 0 and lane == 0:` -> `if .* < 0)",
        "a block has one tile, so nobody waits for the slot of its last step",
    ),
    Equivalent(
        ("blocks share sums",),
        ("no arrive", "moved arrive", "moved wait", *PREDICATE),
        r"^line (29|30|31) ",
        "a block has one tile, so nobody waits for the slot of its last step",
    ),
    Equivalent(
        ("blocks share sums",),
        ("wrong role",),
        r"^line 36 ",
        "what all blocks summed lies in shared memory, so any four warps may add it up",
    ),
    Equivalent(CHOSEN, ("wrong registers",), r"registers=40\):` -> .*=(48|104)", "a processor has as many registers"),
    Equivalent(
        CHOSEN,
        ("no wait", "waits for too little", "wrong kind of group", "no barrier", "moved barrier"),
        r"`(wait_groups\(1, 'bulk'\)|sync\(1, 4\))` (is gone|->)|^line 35 .* -> `sync\(1, 4\)",
        "a tile has no more subtiles than there are slots, and a block one tile",
    ),
    Equivalent(CHOSEN, ("wrong box",), r"tensor_store\(.*\[64, 16\]\)` -> .*\[32, 16\]", "rows beyond the last"),
    Equivalent(
        ("warps in roles", "convolution", "roles, staged", "transposed matmul of bfloat16"),
        PREDICATE,
        r"^line (35|37|49|51) `if warp (% 4 == 0|< 2) and lane == 0:`",
        "who stored nothing has nothing to wait for",
    ),
    Equivalent(
        ("warps in roles",),
        ("moved wait",),
        r"-> `if warp < 2 and lane == 0:`",
        "it waits for the stores before the products, not after",
    ),
    Equivalent(
        PANELS,
        MOVED,
        r"`wait_barrier\(full0.* -> `sync\(\)`",
        "all wait for the boxes and for each other, in either order",
    ),
    Equivalent(
        ("first factor in registers",),
        ("no wait", "waits for too little", "wrong kind of group", "moved wait"),
        r"^line (29 `wait_groups\(1|23 .*-> `wait_groups\(1)",
        "those who waited for half of the registers have waited for the step before",
    ),
    Equivalent(
        (*PANELS, "registers for wgmma"),
        ("moved fence",),
        r"`if .*` -> `fence\('wgmma'\)`",
        "the copies between touch none of the registers",
    ),
    Equivalent(
        PANELS,
        (*BARRIER, *MOVED),
        r"(`sync\(\)` (is gone, before|->) `for [ei]|`(wait_groups\(0, 'wgmma'\)|for t\d+ in serial.*:)` -> `sync)",
        "every step has a barrier, and the next tile's first boxes come to other slots than the last step's",
    ),
    Equivalent(
        ("registers for wgmma", "lanes share steps"),
        ("no store", "off by one"),
        r"_r0\[i\d+, \d\] = .*\(0.0\)` (is gone|->)",
        "what is left there of the step before meets zeros of the other factor, or a row that is not stored",
    ),
    Equivalent(
        ("registers for wgmma",),
        ("moved wait",),
        r"`wait_groups\(0, 'wgmma'\)` -> `if t",
        "the other slab is filled while the products are on their way",
    ),
    Equivalent(
        ("warps share steps", "warpgroups share steps"),
        ("wrong slot",),
        r"(`meet0\[.*\] = |= add\(acc0\[.*meet0\[)",
        "the warps exchange what they add, before a barrier of both",
    ),
    Equivalent(
        SUMS, PREDICATE, r"`if lane == 0( and warp == 0)?:`", "every thread has the result, so any may store it"
    ),
    Equivalent(
        (*MET, "lanes share steps"),
        PREDICATE,
        r"`if [^`]*(lane|warp)[^`]* == 0[^`]*:`",
        "every lane and every warp of those that add up has the result, so any may store it",
    ),
    Equivalent(
        ("warps, staged",),
        PREDICATE,
        r"`in0 = b\[.* < 60 and .* -> `in0 = b\[",
        "a row beyond the last has the same columns of b, and is not stored",
    ),
    Equivalent(
        ("registers for wgmma",),
        PREDICATE,
        r"^line (18|50) ",
        "what more threads load stays in their registers: the condition of the store leaves it out",
    ),
    Equivalent(
        RINGS,
        ("no wait", "waits for too little", "wrong kind of group", "moved wait", "moved barrier"),
        r"`wait_groups\(0\)`",
        "the groups that are left after the last step are empty",
    ),
    Equivalent(
        (*RINGS, BOXES),
        BARRIER,
        r"`sync\(\)` is gone, before `(for [ie]\d+|once0 = registers)",
        "nobody uses shared memory after it",
    ),
    Equivalent(
        (*RINGS, BOXES),
        MOVED,
        r"(`sync\(\)` -> `(for i|once0 = registers)|`for t\d+ in serial\(\d+\):` -> `sync)",
        "nobody uses shared memory after it",
    ),
    Equivalent(
        (*RINGS, "lanes share steps", "registers for wgmma"),
        PREDICATE,
        r"`if t\d+ (< \d+|== 0):` (-> `if t|is gone)",
        "one slab more is of zeros or of the step before, and nobody reads it",
    ),
    Equivalent(
        (BOXES, "registers by hand", "split by hand"),
        MOVED,
        r"`sync\(\)` -> `(for t4|if warp == 0 and lane == 0:)",
        "the thread that made the barriers sends the boxes; the others wait for it before they wait for those",
    ),
    Equivalent(
        ("registers by hand", "split by hand"),
        ("wrong barrier",),
        r"`expect\(",
        "one thread announces the same bytes at all barriers: in another order, and before anybody waits",
    ),
    Equivalent(
        ("split by hand",),
        ("wrong slot",),
        r"(tensor_store|move)\(",
        "the warpgroups exchange what they add, after a barrier of both",
    ),
    Equivalent(
        ("ping_pong by hand",),
        ("moved wait",),
        r"-> `wait_barrier\(turn\[[12]\]",
        "they wait for their turn to store before they multiply, or before they let the other multiply: "
        "sooner than they need",
    ),
    Equivalent(
        WAVES,
        ("wrong number of steps",),
        r"`for i\d* in serial\((\d)\):` -> `for i\d* in serial\([2-9]\)",
        "tiles beyond the last are left out",
    ),
    Equivalent(
        ("persistent by hand",), PREDICATE, r"^line (32|45) ", "those who stored nothing have nothing to wait for"
    ),
    Equivalent(
        ("persistent by hand",),
        ("moved wait",),
        r"-> `if warp % 4",
        "it waits for the stores before the products, not after",
    ),
    Equivalent(
        ("split product", "conv1d", "warps, staged"),
        MOVED,
        r"`sync\(\)` -> `if t[58] == 0:`",
        "only the first step fills a slot, which nobody has used: there are as many steps as slots",
    ),
    Equivalent(
        ("split product", "copies for wgmma", "warps, staged"),
        PREDICATE,
        r"`async_copy\(",
        "the condition around it says the same of the step",
    ),
    Equivalent(
        ("conv1d",),
        PREDICATE,
        r"^line (7|17) .*( < 33 and|\] if lane % 4 < 3 else)",
        "the condition around it leaves 16 rows, so none of them is beyond the last",
    ),
    Equivalent(
        ("chain by hand",),
        ("wrong barrier",),
        r"`wait_barrier\(empty_k",
        "it waits until the slot after is free, or was before: no sooner than it needs",
    ),
    Equivalent(
        ("chain by hand",),
        ("no fence", "moved fence", "wrong kind of fence"),
        r"^line 54 ",
        "the fence before the other product is for both; ptxas wants one in front of a factor in registers",
    ),
    Equivalent(
        ("chain by hand",),
        ("moved wait",),
        r"`for j in unrolled\(24\):` -> `wait_groups\(0",
        "it waits for the second product before it is done with the first, not after",
    ),
    Equivalent(
        ("conv1d", "conv2d"),
        ("wrong number of steps",),
        r"`for k8 in unrolled\(4\):`",
        "a fourth column of the filter is of zeros",
    ),
    Equivalent(
        (
            "softmax",
            "variance",
            "split product",
            "ragged matmul of bfloat16",
            "swiglu",
            "conv1d",
            "conv2d",
            "attention",
            "attention of half",
            *("copies for wgmma", "registers for wgmma", "warps share steps", "warps, staged", "lanes share steps"),
            *("roles, staged", "three warpgroups", "chain of keys down"),
        ),
        ("wrong number of steps",),
        r"`for [ei]\d+ in unrolled\(([1248])\):` -> `.*\([2359]\)",
        "a condition inside leaves out what is beyond the row or the tile",
    ),
    Equivalent(
        ("softmax of columns",),
        ("wrong number of steps",),
        r"^line (12|46) `for i\d in unrolled\(2\):`",
        "8 rows are left for 16 threads: a condition inside leaves out the second step, and any beyond",
    ),
    Equivalent(
        ("attention", "attention of half"),
        ("wrong beginning",),
        r"`(acc0 = registers|acc1 = registers\(f32\[4, 4\])",
        "the same number added to all scores changes no softmax",
    ),
    Equivalent(
        ("attention of half", "reduced columns"),
        PREDICATE,
        r"`if lane % 2 == 0 and \(lane // 2\) % 2 == 0:`",
        "the four lanes of a row have its maximum and its sum, so any of them may store these",
    ),
    Equivalent(
        ("matmul of half",),
        PREDICATE,
        r"^line (44|55) .* < 19\d:` -> .* < 1[89]\d:",
        "the second step of a piece is whole, or wholly beyond the last",
    ),
    Equivalent(
        ("attention of half", *COPIED),
        ("wrong number of steps",),
        r"`for t\d+ in unrolled\(1\):` -> .*\(2\)",
        "what the first step brings once more comes to the same places, before anybody reads them",
    ),
    Equivalent(
        ("cluster_sum by hand",),
        PREDICATE,
        r"^line 1[147] `if lane == 0",
        "all threads of the warp, or of the block, have the same number to write",
    ),
    Equivalent(
        (*CHAINS, "attention of half", "chain of keys down"),
        ("wrong beginning",),
        r"`(total|acc)0 = registers",
        "the first maximum scales to zero whatever was added up before",
    ),
    Equivalent(
        (*CHAINS, "chain of keys down"),
        ("wrong beginning",),
        r"`acc1 = registers",
        "the same number added to all scores changes no softmax",
    ),
    Equivalent(
        (*CHAINS, *HANDED),
        ("moved arrive",),
        r"`for i\d in unrolled\(\d\):` -> `if lane == 0:`",
        "what is multiplied has come to registers before",
    ),
    Equivalent(
        CHAINS[:1],
        ("moved arrive",),
        r"`for t11 in serial\(3\):` -> `if lane == 0:`",
        "who loads is two steps ahead at most, so the next but one tile is never asked for before its turn",
    ),
    Equivalent(
        (*CHAINS[1:], "convolution", "first factor in registers"),
        ("wrong barrier",),
        r"-> `(wait_barrier|arrive)\(empty\d\[\(.*% 3\) \+ [12]\) % 3",
        "slots are waited for in turn: one is a step late, and behind it all others are free",
    ),
    Equivalent(
        (*CHAINS, *HANDED),
        ("moved wait",),
        r"-> `wait_barrier\(empty|`wait_barrier\(empty0.* -> `expect|`wait_barrier\(full2.* -> `wait_groups",
        "it waits sooner than it needs, announces what nobody sends yet, or waits for both in the other order",
    ),
    Equivalent(
        ("overlapped chain that stays",),
        ("no fence", "moved fence", "wrong kind of fence"),
        r"^line 9[56] ",
        "the fence before the other product is for both; ptxas wants one in front of a factor in registers",
    ),
    Equivalent(
        CHAINS[1:2],
        ("moved wait",),
        r"^line 100 ",
        "keys come again after values whose slot is freed later in this step",
    ),
    Equivalent(
        CHAINS[1:],
        PREDICATE,
        r"`if .*( - 49:` -> `.* - 32:|<= t11 \+ 1:` -> `.* <= t11 \+ 2:|== 0:` -> `.* < 2:)`",
        "the mask hides nothing in the other steps",
    ),
    Equivalent(
        CHAINS[2:],
        ("wrong number of steps",),
        r"^line 61 .*\(3\)",
        "the window hides nothing of the last eight keys of its first step",
    ),
    Equivalent(
        CHAINS[:1],
        PREDICATE,
        r"^line 150 ",
        "both warps have the sums of all keys, so either may store them",
    ),
    Equivalent(
        CHAINS,
        PREDICATE,
        r"`if .*(<= t11|<= t11 \+ 1|t11 \* 32 <= .*|== 0):` is gone",
        "the mask hides nothing in the other steps",
    ),
    Equivalent(
        CHAINS[1:2],
        ("no store", "off by one", "of another warp"),
        r"^line (77 `v5 = |79 `total0)",
        "sums are zero before the first step, whatever they are worth then",
    ),
    Equivalent(
        CHAINS[1:2],
        ("off by one", "wrong reduction"),
        r"^line (65 `v2 = |66 `moved0 = vote)",
        "in the first step every lane has a row of which it sees a score",
    ),
    Equivalent(
        CHAINS[1:2],
        ("no store",),
        r"^line (169 `base0|170 `top0)",
        "nobody asks for the frame, or for the highest score, behind the last step",
    ),
    Equivalent(
        ("argmax",),
        ("no store",),
        r"^line 72 `acc0_0\[\(\)\] = ",
        "the last maximum is compared with nothing more: only where it is matters",
    ),
    Equivalent(
        (CHAINS[0], "chain of keys down"),
        ("no store",),
        r"`top1\[i15\] = f32\(-inf\)` is gone",
        "a warp's own maximum is among those that it goes through next",
    ),
    Equivalent(
        CHAINS[:1],
        ("wrong slot",),
        r"(= (add|max)\((acc0|total0|top1)\[.*meet|`meet)",
        "what two warps have is combined in either order",
    ),
    Equivalent(
        CHAINS[:1],
        (*BARRIER, *MOVED),
        r"^line (112|116|128|132|137|142) ",
        "there are other barriers before these places are written again",
    ),
    Equivalent(
        ("chain of keys down",),
        ("no store",),
        r"`top0\[e2\] = top1\[e2\]` is gone",
        "nobody asks for the maximum once all sums are in its frame",
    ),
    Equivalent(
        ("chain of keys down",),
        PREDICATE,
        r"`if warp % 2 == 0:`",
        "both warps have the sums of all keys, so either may store them",
    ),
    Equivalent(
        ("chain of keys down",),
        PREDICATE,
        r"`async_copy\(q_s0",
        "the condition around it leaves as many rows as there are",
    ),
    Equivalent(
        HANDED,
        MOVED,
        r"`sync\(1, \d\)` -> `wait_barrier\(full2",
        "threads wait for the values before they wait for each other, not after",
    ),
    Equivalent(
        HANDED,
        ("moved arrive",),
        r"`for t\d+ in serial\(3\):` -> `if lane == 0:`",
        "who loads is two steps ahead at most, so the next but one tile is never asked for before its turn",
    ),
    Equivalent(
        HANDED[1:],
        ("no arrive", "no wait", "wrong arrivals", *PREDICATE),
        r"(`arrive\(empty0|`wait_barrier\(empty0|`empty0 = |^line 70 )",
        "a block has one tile, so nobody waits for the slot of its queries",
    ),
)
