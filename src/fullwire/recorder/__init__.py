"""Record a command, which runs unchanged, as a Run.

A recorder works inside the command's processes, and a sampler of the host runs beside them.

    record.py      the whole: run the command, or each of its parts, and make the Run
    launch.py      the command, in an environment that makes each of its Pythons load the recorder
    path/          the folder that this environment puts on PYTHONPATH: one sitecustomize.py
    inside/        the recorder itself, which runs in the job: standard library and torch only
    sampler.py     the process that samples the host, before it leaves the rest to native code
    journals.py    the files that the processes wrote, read as far as they are whole
    samples.py     the files that the samplers wrote, read in the same way, and their tables
    steps.py       notes of one process -> its steps
    hosts.py       facts of the hosts, and the differences between the clocks of machines
    assemble.py    journals and samples -> Run
"""
