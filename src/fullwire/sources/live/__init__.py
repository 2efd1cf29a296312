"""The recorder inside a training job: a command is run unchanged, and what it did becomes a Run.

record.py      the whole: run the command, read what its processes wrote, make the Run
launch.py      the command, in an environment that makes each of its Pythons load the recorder
path/          what that environment puts on PYTHONPATH: one sitecustomize.py
inside/        the recorder itself, which runs in the job: standard library and torch only
journals.py    the files that the processes wrote, read as far as they are whole
steps.py       notes of one process -> its steps
assemble.py    journals -> Run
"""
