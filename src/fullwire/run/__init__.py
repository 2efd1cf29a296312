"""The type that every source makes and every view reads: a run, its facts, gaps and directory."""
