"""Training that goes on when workers are lost, and lets new ones in.

elastic.py      `fullwire.elastic`, which makes a script's job
job.py          that job: a script's model and optimizer in it
workers.py      `fullwire run --workers`: starts the workers of a host, again where they die
membership.py   the rules by which ranks agree on members and steps, apart from sockets
mesh.py         the connections between members
joining.py      the state that a new worker takes from the others
state.py        the state of a training as one row of bytes
checkpoints.py  that row on a disk, in parts
gradients.py    the sums of a step
fragments.py    the rules for parts of the parameters, which travel one at a time
sharded.py      a job whose model is sharded with FSDP2
shards.py       its state: each shard on two ranks
sharded_checkpoints.py  its checkpoints, with torch.distributed.checkpoint
pace.py         shares of a batch by speed, and slow workers
launched.py     the place of a process that torchrun, Slurm or Kubernetes started
place.py        the part of one process in the job, and the job's folder
"""
