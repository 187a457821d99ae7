"""Limit the cost of reading YAML, before anything is built: a few lines can expand to billions of nodes."""

import yaml

MOST_BYTES = 1 << 20
MOST_VALUES = 50_000  # with every alias written out
DEEPEST = 64  # sections within sections
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class TooLarge(ValueError):
    """A text beyond the limits, in words."""


def check(text: str) -> None:
    """Raises TooLarge; YAMLError where it is none."""
    if len(text) > MOST_BYTES:
        raise TooLarge(f"{len(text):,} characters, wanted at most {MOST_BYTES:,}")
    sizes: dict[str, int] = {}  # of what each anchor names
    open_parts: list[tuple[str | None, int]] = []  # its anchor, values before it
    values = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _ in open_parts):
                raise TooLarge(f"*{event.anchor} stands within itself")
            values += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_parts.append((event.anchor, values))
            values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_parts.pop()
            if anchor is not None:
                sizes[anchor] = values - before
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
        if len(open_parts) > DEEPEST:
            raise TooLarge(f"nested more than {DEEPEST} deep")
        if values > MOST_VALUES:
            raise TooLarge(f"more than {MOST_VALUES:,} values, counting what its aliases stand for")
