"""A Run on disk: a directory of Parquet tables and one run.json.

    job.run/run.json             format number, provenance, facts, gaps, rows per table, and the
                                 CRC-32 of every file as it was written
    job.run/TABLE.parquet        a table with rows; tables without rows have no file
    job.run/TABLE/*.parquet      or a table in numbered pieces; pieces of one number belong
                                 together, as `RunWriter` was given them: whole steps of ranks
    job.run/packets/*.pcapng     packets captured beside the job; other tools read them, too

`description.py` holds run.json in today's format and in past ones. `parquet.py` holds one table,
and `writing.py` and `reading.py` the whole run. A run.json that was edited by hand still opens, and
a gap reports the edit.
"""

from fullwire.run.store.places import CAPTURES as CAPTURES
from fullwire.run.store.places import is_run as is_run
from fullwire.run.store.places import table_files as table_files
from fullwire.run.store.reading import ByRanks as ByRanks
from fullwire.run.store.reading import by_ranks as by_ranks
from fullwire.run.store.reading import counted as counted
from fullwire.run.store.reading import read_parts as read_parts
from fullwire.run.store.reading import read_rows as read_rows
from fullwire.run.store.reading import read_run as read_run
from fullwire.run.store.reading import rows_written as rows_written
from fullwire.run.store.writing import PRIVATE as PRIVATE
from fullwire.run.store.writing import Piece as Piece
from fullwire.run.store.writing import RunWriter as RunWriter
from fullwire.run.store.writing import new_place as new_place
from fullwire.run.store.writing import refuse_taken as refuse_taken
from fullwire.run.store.writing import write as write
