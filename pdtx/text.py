"""Text of others: peers, files."""


def printable(text: str, instead: str = "?") -> str:
    """Return a line without what steers a terminal, ends it or turns the direction of reading; instead stands there."""
    return "".join(char if char.isprintable() else instead for char in text)
