"""Text out of files: what may be shown on a terminal."""


def printable(text: str) -> str:
    """Return a line without what steers a terminal, ends it or turns the direction of reading; '?' stands there."""
    return "".join(char if char.isprintable() else "?" for char in text)
