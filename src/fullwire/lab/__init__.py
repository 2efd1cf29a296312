"""A cluster inside this machine: network namespaces, shaped links, jobs and faults.

    with Lab(describe(workers=4, rate=["1Gbps", "2:300Mbps"])) as lab:
        status = run_job(lab, ["python", "train.py"])

Everything that a lab makes lives in namespaces of its own, held by one process inside them. A lab
never touches the machine's own interfaces or its list of named namespaces, whether root runs it or
another user. When that process ends, for any reason, the kernel removes the namespaces.

    description   the cluster that a lab imitates, as a value, checked before anything is made
    lab           the handle: start, run jobs, disturb, end
    session       one job on a lab: its ranks, its timetable of faults, its exit status
    supervisor    the process that holds the namespaces, and serves the handle
    namespaces, links, rates    what the supervisor works with
    messages      the words between the handle and the supervisor
    faults        what a timetable does to hosts: slow, cut, pause, restore, kill
    terminal      who has the terminal's foreground
    trainer       the built-in training, which imitates a workload
    emulated      the same training as emulated ranks"""

TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")  # as commands
