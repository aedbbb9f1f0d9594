"""A program that uses muster.forkserver, for tests."""

import json
import re

from launching import Job

PRELUDE = """
import json, os, signal, subprocess, sys, threading
from muster import forkserver
context = forkserver.get_context()
def say(*words): os.write(1, (' '.join(map(str, words)) + '\\n').encode())
def pause(): say('child', os.getpid(), os.getppid()); signal.pause()
def start(target, *args):
    process = context.Process(target=target, args=args)
    process.start()
    return process
"""
FACTS = """
def facts():
    import multiprocessing.process as process
    import numpy, random, torch
    main = sys.modules['__main__']
    found = {
        'argv': sys.argv, 'path': sys.path, 'cwd': os.getcwd(), 'umask': os.umask(0o77), 'name': __name__,
        'main': main.__name__, 'environ': dict(os.environ), 'process': context.current_process().name,
        'parent': context.parent_process().pid == int(os.environ['PARENT']), 'origin': process.ORIGINAL_DIR,
        'threads': [thread.name for thread in threading.enumerate()], 'torch threads': torch.get_num_threads(),
        'signals': [str(signal.getsignal(n)).partition(' at 0x')[0] for n in (1, 2, 10, 12, 13, 15, 17)],
        'mask': sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), 'group': os.getpgid(0) - int(os.environ['GROUP']),
        'stdin': os.readlink('/proc/self/fd/0'), 'flags': repr(sys.flags), 'cpus': sorted(os.sched_getaffinity(0)),
        'zygote': [name for name in sys.modules if '_zygote' in name],
        'authkey': context.current_process().authkey == bytes.fromhex(os.environ['KEY']),
        'output': [f'{s.name} {type(s.buffer)} {s.line_buffering} {s.write_through} {s.encoding} {s.errors}'
                   for s in (sys.stdout, sys.stderr)],
        'daemon': context.current_process().daemon, 'collects': __import__('gc').isenabled(),
    }
    say(json.dumps(found))
    say('random', random.random(), numpy.random.random(), torch.rand(1).item(), torch.initial_seed())
"""


# Prints the facts of a spawned process, then of two forked ones. All get the variables in SETTINGS.
MATCH = """
SETTINGS = json.loads(os.environ.pop('SETTINGS'))
import multiprocessing
sys.argv.append('word'); sys.path.append('/nowhere'); os.umask(0o27)
forkserver.ensure_running()
os.environ.update(PARENT=str(os.getpid()), GROUP=str(os.getpgid(0)), VALUE='a b', **SETTINGS)
os.environ['KEY'] = multiprocessing.current_process().authkey.hex()
os.chdir('/')
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
for one in (multiprocessing.get_context('spawn'), context, context):
    process = one.Process(target=facts, name='worker', daemon=True)
    process.start()
    process.join()
    assert process.exitcode == 0, process.exitcode
"""


def differences(job: Job) -> set[str]:
    assert job.finish() == 0, job.err
    spawned, *forked = map(json.loads, re.findall(r"^\{.*", job.out, re.MULTILINE))
    assert len(forked) == 2
    return {name for found in forked for name in spawned if found[name] != spawned[name]}
