"""Python numbers and texts among the inputs of a function that is recorded: constants of the record until one changes.

From then on a number is an input of the program, and a text is hidden. What Python itself needs, to branch on it or to
look it up, stays a constant: each value has a record.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, NoReturn

from torch.utils import _pytree as pytree

from torch_bridge.lowering.errors import CannotRecord, TooManyRecords, Unanswerable, stays_in_torch
from torch_bridge.lowering.python.changing import ChangingNumber
from torch_bridge.lowering.recording.objects import Constant

MOST_VALUES = 8  # of items that Python needs; with more, where they are new at most calls, each would be compiled


refusals: list[str] = []  # in the call that is recorded: its code may have caught the error


def refuse(reason: str) -> NoReturn:
    """Raise Unanswerable for what a record cannot answer, and keep the reason."""
    refusals.append(reason)
    raise Unanswerable(reason)


class HiddenText:
    """Stand-in for a text that changes from call to call. Whatever reads it fails."""

    __class__ = property(lambda self: str)  # type: ignore[assignment]  # for isinstance

    def _refuse(self, *_: Any) -> Any:
        refuse("a text among the inputs is read in Python, where it changes from call to call")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse  # type: ignore[assignment]
    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __getattr__ = _refuse
    __int__ = __float__ = __index__ = __fspath__ = __bytes__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __str__ = __repr__ = __format__ = _refuse


@dataclasses.dataclass(frozen=True, eq=False)
class _Hidden(Constant):
    """A text that the record does not hold: all of them are alike."""

    value: Any = dataclasses.field(default_factory=HiddenText, repr=False)

    def __eq__(self, other: Any) -> bool:
        return type(other) is _Hidden

    def __hash__(self) -> int:
        return hash(_Hidden)

    def __deepcopy__(self, memo: Any) -> "_Hidden":  # torch.export copies the structure of its inputs
        return self


pytree.register_pytree_node(
    _Hidden, lambda node: ([], node), lambda _, node: node, flatten_with_keys_fn=lambda node: ([], node)
)


class BatchItems:
    """Follow the numbers and texts of a function's inputs from call to call.

    name: the function's, for messages. A place is the number of the inputs' structure and the position of a leaf.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls = 0
        self._structures: dict[Any, int] = {}
        self._last: dict[tuple, Any] = {}
        self._moving: set[tuple] = set()
        self._needed: set[tuple] = set()
        self._proven: set[tuple] = set()  # that a record has done without
        self._present: set[tuple] = set()  # moving ones of the call at hand
        self._read: list[tuple] = []  # the needed places of the call at hand, with their values
        self._values: set[tuple] = set()  # all that was read so far

    def follow(self, inputs: Any) -> Any:
        """Begin a call; return its inputs with changing numbers, and without the texts that have changed."""
        self._calls += 1
        self._present, self._read = set(), []
        leaves, spec = pytree.tree_flatten(inputs, is_leaf=lambda leaf: type(leaf) is Constant)
        structure = self._structures.setdefault(spec, len(self._structures))
        followed = [self._followed((structure, place), leaf) for place, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(followed, spec) if self._present else inputs

    def _followed(self, place: tuple, leaf: Any) -> Any:
        value = leaf.value if type(leaf) is Constant else leaf
        kind = type(value)
        if kind not in (int, float, str):
            return leaf
        last = self._last.setdefault(place, value)
        if value != last or kind is not type(last):
            self._moving.add(place)
        if place in self._needed:
            self._read.append((place, kind, value))
        if place not in self._moving - self._needed:
            return leaf
        self._present.add(place)
        return _Hidden() if kind is str else ChangingNumber(value)

    def recorded(self) -> None:
        """Note that the call at hand has run compiled."""
        self._proven |= self._present

    def give_up(self, error: CannotRecord) -> bool:
        """Make constants of the items that no record has done without yet, integers first, then texts; return False if
        there are none. error: why the call at hand could not run compiled."""
        new = set() if stays_in_torch(error) else self._present - self._proven
        for kind in (int, str, float):
            if chosen := {place for place in new if type(self._last[place]) is kind}:
                self._needed |= chosen
                return True
        return False

    def check(self) -> None:
        """Raise TooManyRecords if Python has needed new values at most calls. To be called where a record is made."""
        if self._read:
            self._values.add(tuple(self._read))
        self.check_ways(self._values)

    def check_ways(self, ways: Collection[Any]) -> None:
        """Raise TooManyRecords if these, each of which has a record, are too many for the calls so far."""
        if len(ways) > MOST_VALUES and 2 * len(ways) > self._calls:
            raise TooManyRecords(
                f"{self.name}: Python reads numbers or texts of its inputs that are new at most calls: give tensors, "
                "and compute with torch.where"
            )
