"""Case H2's table, written down once: who reads which heads from whom."""

from collections.abc import Mapping

HeadsTaken = Mapping[int, list[tuple[int, list[int]]]]
"""Of each destination rank: the source ranks it reads, and the model's heads that it takes from each."""

HEADS_TAKEN: Mapping[tuple[int, int, int], HeadsTaken] = {
    (4, 4, 8): {rank: [(rank, [2 * rank, 2 * rank + 1])] for rank in range(4)},
    (4, 2, 8): {0: [(0, [0, 1]), (1, [2, 3])], 1: [(2, [4, 5]), (3, [6, 7])]},
    (2, 4, 8): {0: [(0, [0, 1])], 1: [(0, [2, 3])], 2: [(1, [4, 5])], 3: [(1, [6, 7])]},
    (1, 4, 2): {0: [(0, [0])], 1: [(0, [0])], 2: [(0, [1])], 3: [(0, [1])]},
    (8, 16, 8): {rank: [(rank // 2, [rank // 2])] for rank in range(16)},
    (8, 1, 2): {0: [(0, [0]), (4, [1])]},
    (2, 1, 1): {0: [(0, [0])]},
}
"""By (source ranks, destination ranks, KV heads), as an outside source has them."""
