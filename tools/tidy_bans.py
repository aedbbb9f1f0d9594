"""The table of tidy.py: banned code, and its replacement."""

from __future__ import annotations

from typing import NamedTuple

CORE = r"^src/muster/(?!torch/|launch/|cli/)"
CPP = r"^(src|tests|python/bindings|benchmarks)/.*\.(h|cpp)$"
TORCH = r"^(src/muster|tests)/torch/|^python/bindings/"
PYTHON = r"\.py$"
ANY = r"."
NOTHING = r"(?!)"
KEEP_THREAD = "keep the thread and join it in its owner's destructor"


class Ban(NamedTuple):
    rule: str
    where: str  # a pattern of paths
    pattern: str  # of a line; C++ comments and literals are blanked first, except for IN_COMMENTS
    instead: str
    but_not: str = NOTHING  # a pattern of paths


# fmt: off
BANS = [
    Ban("print", CORE, r"\bstd::(cout|cerr|clog)\b|\b(f?printf|f?puts)\s*\(", "log through base/log.h",
        but_not=r"/base/(check|log)\.cpp$"),
    Ban("throw", CORE, r"\bthrow\b", "return a Result (base/error.h)"),
    Ban("assert", CPP, r"(?<!\w)assert\s*\(", "use MUSTER_CHECK: no build type removes it"),
    Ban("c-string", CPP, r"\b(strcpy|strcat|v?sprintf|gets)\s*\(", "use std::string or fmt::format"),
    Ban("detach", CPP, r"\bthread\w*(\.|->)detach\(\)|\bpthread_detach\b", KEEP_THREAD),
    Ban("using-namespace", CPP, r"\busing\s+namespace\b", "write the namespace, or name what is used"),
    Ban("random", CPP, r"\bs?rand\s*\(|\bstd::(mt19937|random_device)", "use base/random.h: it is seeded",
        but_not=r"/base/random\.cpp$"),
    Ban("regex", CPP, r"\bstd::regex\b", "parse by hand: std::regex recurses on its input"),
    Ban("shell", CPP, r"\b(system|popen)\s*\(", "use posix_spawn or execve with a list of arguments"),
    Ban("sleep", CPP, r"\b(sleep_for|sleep_until|usleep|nanosleep|sleep)\s*\(",
        "wait for the event itself, with a Deadline"),
    Ban("clock", r"^src/muster/", r"\bstd::chrono::(steady|system|high_resolution)_clock\b",
        "take a Clock (base/clock.h)", but_not=r"/base/clock\.cpp$"),
    Ban("stoi", CPP, r"\bstd::sto(i|l|ul|ll|ull|f|d)\s*\(|\bato[ifl]+\s*\(",
        "use std::from_chars: it reports errors and never throws", but_not=TORCH),
    Ban("glibc", r"^(src|python/bindings|benchmarks)/.*\.(h|cpp)$",
        r"\b(epoll_pwait2|sig(abbrev|descr)_np|gettid|pidfd_\w+|close_range|closefrom|arc4random\w*|strlc\w+)\s*\(",
        "glibc 2.28 lacks it, and wheels run with that: use ::syscall() or an older function"),
    Ban("volatile", CPP, r"\bvolatile\b(?!\s*\()", "use std::atomic"),
    Ban("intrinsics", CPP, r"#\s*include <(\wmmintrin|immintrin|arm_neon)\.h>",
        "write a plain loop: it is compiled once per instruction set (kernels/)"),
    Ban("pickle", r"^python/muster/.*\.py$",
        r"\b(pickle|marshal)\.(loads?|Unpickler)\(|\bload\(.*\ballow_pickle=True|\btorch\.load\(|\w_object(_list)?\(",
        "send typed values: unpickling runs code"),
    Ban("shell", PYTHON, r"\bos\.(system|popen)[(]|shell[=]True", "call subprocess with a list"),
    Ban("sleep", r"^(python|tests)/.*\.py$", r"\btime\.sleep\(", "wait for the event itself, with a deadline"),
    Ban("machine", ANY, r"(?<![\w.])/(home|work|root|opt|mnt|Users)/\w",
        "name no machine's folders: use relative paths"),
    Ban("machine", ANY,
        r"\bpypi\.org\b|\bpythonhosted\.org\b|\bdownload\.pytorch\.org\b|index[-]url|jfr[o]g|artifact[o]ry",
        "name no package registry: the user's own settings know theirs"),
    Ban("todo", ANY, r"\b(TO[D]O|FIX[M]E|XX[X])\b(?!\([^)]+\): \S|: \S+ \S+ \S+)",
        "say what is missing and why it can wait"),
]
# These rules also apply to comments and strings.
IN_COMMENTS = {"machine", "todo"}
