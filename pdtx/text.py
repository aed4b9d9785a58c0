"""Text of others: peers, files."""


def printable(text: str, instead: str = "?") -> str:
    """Return a line without what steers a terminal, ends it or turns the direction of reading; instead stands there."""
    return "".join(char if char.isprintable() else instead for char in text)


MAX_REASON = 1000
"""Characters of a reason, as nodes give them to each other."""


def reason_of(said: object) -> str:
    """Return why something failed, said by a peer or for one: one printable line at a bearable length."""
    return printable(str(said)[:MAX_REASON], " ") or "no reason given"
