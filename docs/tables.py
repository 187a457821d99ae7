"""A hook of mkdocs for rows of tables: no backslash before a pipe inside code, which GitHub alone wants, and no line
break inside a date or a figure such as 2e-06."""

import re

WHOLE = re.compile(r"(?<![\w.-])(?:20\d\d-\d\d-\d\d|\d[\d.]*e-\d+)(?![\w.-])")


def on_page_markdown(markdown: str, **_: object) -> str:
    lines = markdown.split("\n")
    return "\n".join("".join(map(_part, re.split("(`[^`]*`)", x))) if x.startswith("|") else x for x in lines)


def _part(text: str) -> str:
    if text.startswith("`"):
        return text.replace(r"\|", "|")
    return WHOLE.sub(r'<span class="whole">\g<0></span>', text)
