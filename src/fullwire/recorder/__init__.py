"""A command is run unchanged, and what it did becomes a Run: a recorder inside its processes, and a
sampler of the host beside them.

record.py      the whole: run the command, or each of its parts, and make the Run
launch.py      the command, in an environment that makes each of its Pythons load the recorder
path/          what that environment puts on PYTHONPATH: one sitecustomize.py
inside/        the recorder itself, which runs in the job: standard library and torch only
sampler.py     the process that samples the host, before it leaves the rest to native code
journals.py    the files that the processes wrote, read as far as they are whole
samples.py     the same of the files that the samplers wrote, and their tables
steps.py       notes of one process -> its steps
hosts.py       what is known of the hosts, and how far the clocks of machines are apart
assemble.py    journals and samples -> Run
"""
