"""Turn measured loads of experts into a placement for `--expert-placement`.

    llm = LLM(model, tensor_parallel_size=2, enable_expert_parallel=True)
    llm.generate(prompts)
    Path("loads.json").write_text(json.dumps(llm.expert_loads().tolist()))

    uv run python tools/expert_placement.py loads.json placement.json --ranks 4 --redundant 2

The file of loads holds, for each layer with experts, how many tokens went to each expert. Each layer gets a
placement of its own; for each it is told how many tokens the busiest rank gets, in shares of an equal part.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from collectives import ExpertPlacement, save_placements


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("loads", type=Path, help="JSON: [[tokens of each expert] of each layer]")
    parser.add_argument("placement", type=Path, help="file to write")
    parser.add_argument("--ranks", type=int, required=True, help="ranks that share the experts")
    parser.add_argument("--redundant", type=int, default=0, help="copies beyond one of each expert")
    given = parser.parse_args(arguments)
    try:
        layers = read_loads(given.loads)
        if given.ranks < 1:
            raise ValueError(f"--ranks must be at least 1, got {given.ranks}")
        placements = [ExpertPlacement.balanced(loads, given.ranks, given.redundant) for loads in layers]
        save_placements(given.placement, placements)
    except (OSError, ValueError) as error:
        print(f"expert_placement: {error}", file=sys.stderr)
        return 2
    for number, (loads, placement) in enumerate(zip(layers, placements, strict=True)):
        even = busiest(ExpertPlacement.even(len(loads), given.ranks), loads)
        print(f"layer {number} with experts: {even:.2f} if even, {busiest(placement, loads):.2f} as placed")
    return 0


def read_loads(path: Path) -> list[list[float]]:
    """Return the loads of each layer. ValueError, which names the file, when they are not of one model."""
    layers = json.loads(path.read_text())
    numbers = isinstance(layers, list) and all(
        isinstance(loads, list) and all(isinstance(load, int | float) for load in loads) for loads in layers
    )
    if not numbers or len({len(loads) for loads in layers}) != 1 or not layers[0]:
        raise ValueError(
            f"{path} holds no loads, [[tokens of each expert] of each layer], equally many a layer"
        )
    return layers


def busiest(placement: ExpertPlacement, loads: Sequence[float]) -> float:
    """The load of the busiest rank, of which 1 is an equal part; copies share that of their expert."""
    copies = [sum(expert in held for held in placement.ranks) for expert in range(len(loads))]
    of_ranks = [sum(loads[expert] / copies[expert] for expert in held) for held in placement.ranks]
    return max(of_ranks) * len(of_ranks) / (sum(loads) or 1)


if __name__ == "__main__":
    sys.exit(main())
