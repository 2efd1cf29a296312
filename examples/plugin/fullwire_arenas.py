"""A fix of your own: fewer arenas of malloc, `fullwire apply arenas:2 -- COMMAND`."""

from fullwire.fixes import FixKind


class Arenas(FixKind):
    """Set the number of arenas in each process of the job."""

    key = "arenas"
    label = "arenas of malloc"
    addresses = ("host",)
    example = "2"
    setting = "arenas of malloc in each process"
    variables_suffice = True  # malloc reads its variable in each process, with torch or without

    def environment(self, setting):
        """Return the variable that malloc reads."""
        return {"MALLOC_ARENA_MAX": setting}

    def apply(self, setting, process):
        """Note that the process began with the variable."""
        process.did(f"applied: {setting} arenas")
