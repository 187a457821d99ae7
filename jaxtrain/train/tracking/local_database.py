"""Build the address of an SQLite file, escaping special characters in its path."""

import pathlib

from sqlalchemy import URL, make_url

from jaxtrain.errors import UserError


def address(path: pathlib.Path) -> str:
    """Return the file's address, `sqlite:///...`. Raises UserError if SQLAlchemy would read another path from it."""
    database = str(path.absolute())
    url = URL.create("sqlite", database=database).render_as_string(hide_password=False)
    if make_url(url).database != database:  # SQLAlchemy before 2.1 does not escape ? and %
        raise UserError(f"{path}: SQLAlchemy takes no ?, % or # in the path of a database; choose another folder")
    return url
