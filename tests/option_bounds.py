"""Check of the bounds that settings declare."""

from __future__ import annotations

import pytest

from rlstruct.options import Options, declared, described


def check_bounds(kind: type[Options]) -> None:
    """One step beyond each bound is refused with the words that the documentation has."""
    documented = {name: text for one in reversed(kind.__mro__) for name, text in described(one).items()}
    for name, allowed in declared(kind, "range").items():
        beyond = {"at_least": -1, "above": 0, "at_most": 1}
        for bound, step in beyond.items():
            if (limit := getattr(allowed, bound)) is not None:
                with pytest.raises(
                    ValueError, match=rf"^{kind.__name__}: {name} is {limit + step}, expected {allowed}"
                ):
                    kind(**{name: limit + step})
                assert documented[name].lower().endswith(f"{allowed}.")
