"""A cluster inside this machine: network namespaces, shaped links, jobs and faults.

    with Lab(describe(workers=4, rate=["1Gbps", "2:300Mbps"])) as lab:
        status = run_job(lab, ["python", "train.py"])

Everything that a lab makes lives in namespaces of its own, held by one process inside them. The
machine's own interfaces and its list of named namespaces are never touched, by root or by others,
and when that process ends, however it ends, the kernel removes the rest.

    description   what a lab is to be, as a value, checked before anything is made
    lab           the handle: start, run jobs, disturb, end
    session       one job on a lab: its ranks, its timetable of faults, its exit status
    supervisor    the process that holds the namespaces, and serves the handle
    namespaces, links, processes, rates, capacity    what the supervisor works with
"""
