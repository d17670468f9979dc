"""The ledger of gpu-check: which program has run on which GPU, with which files, and with which result.

It is docs/measurements/gpu-ledger.json, and a table in gpu.md beside it. A sitting on a GPU is short, so each goes on
where the last one ended: what has not passed since the files that it covers changed is due, in this order: what failed
or was cut off, what never ran, the rest.
"""

import hashlib
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MEASUREMENTS = pathlib.Path("docs/measurements")
NAME = "gpu-ledger.json"
MARKS = "<!-- scripts/gpu-check -->\n", "<!-- end of scripts/gpu-check -->\n"
FORMAT = 1
# Of a program that never ran.
UNKNOWN_SECONDS = 60
# What a program may take beyond its last time.
MARGIN = 1.25
# Results of programs that have run. Others, such as `skipped`, are no rows of the ledger.
RESULTS = ("passed", "failed", "cut off", "interrupted")


class Unusable(Exception):
    """An input that cannot be used: one line that says what to do."""


def read(path, what, check):
    """Returns what a JSON file has, if `check` accepts it."""
    try:
        data = json.loads(path.read_text())
        if check(data):
            return data
        given = data.get("format") if isinstance(data, dict) else None
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Unusable(f"{path} is no {what} of gpu-check ({error}): nothing was changed") from error
    if given is None:
        raise Unusable(f"{path} is no {what} of gpu-check: nothing was changed")
    raise Unusable(f"{path} is a {what} of format {given}, and this gpu-check has {FORMAT}: take the one it is from")


def covered(pattern, root):
    """Returns the files of a pattern, a file, or those of a module."""
    if "*" in pattern:
        return root.glob(pattern)
    files = [root / pattern, root / f"{pattern}.rs", *(root / pattern).rglob("*")]
    # Modules of this name are of the software driver.
    return (path for path in files if path.is_file() and path.name != "software.rs")


def hashes(programs, root=ROOT):
    """Returns a hash of the files that each program covers, by the program's name."""
    content, by_name = {}, {}
    for program in programs:
        paths = set()
        for pattern in program.covers:
            found = set(covered(pattern, root))
            if not found:
                raise Unusable(f"{program.name} covers {pattern}, and there is no such file: correct gpu/programs.py")
            paths |= found
        digest = hashlib.sha256()
        for path in sorted(paths):
            if path not in content:
                content[path] = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(root)} {content[path]}\n".encode())
        by_name[program.name] = digest.hexdigest()[:16]
    return by_name


class Ledger:
    def __init__(self, path):
        self.path = path
        self.rows = []
        if path.exists():
            self.rows = read(path, "ledger", lambda data: data["format"] == FORMAT and data["rows"] is not None)["rows"]

    def last(self, name):
        return next((row for row in reversed(self.rows) if row["program"] == name), None)

    def state(self, name, digest):
        """Returns the rank of a program among those that are due and why, or None if it is not."""
        last = self.last(name)
        if last is None:
            return 1, "never ran"
        if last["result"] != "passed":
            return 0, f"{last['result']} on {last['date'][:10]}"
        return None if last["hash"] == digest else (2, f"passed on {last['date'][:10]}, with other files")

    def due(self, programs, digests):
        """Returns the programs that are due, in order, with the reason of each."""
        states = [(self.state(program.name, digests[program.name]), program) for program in programs]
        due = [(state, program) for state, program in states if state]
        return [(program, reason) for (_, reason), program in sorted(due, key=lambda pair: pair[0][0])]

    def seconds(self, name):
        """Returns how long a program is expected to take."""
        taken = [row["seconds"] for row in self.rows if row["program"] == name and row["seconds"] is not None]
        # What was cut off needs more than it had.
        cut = self.last(name) is not None and self.last(name)["result"] == "cut off"
        return MARGIN * (taken[-1] * (2 if cut else 1) if taken else UNKNOWN_SECONDS)

    def fitting(self, programs, seconds):
        """Returns those of these programs, in their order, that are expected to fit in so many seconds together."""
        chosen = []
        for program in programs:
            if self.seconds(program.name) <= seconds:
                seconds -= self.seconds(program.name)
                chosen.append(program)
        return chosen

    def enter(self, report):
        """Enters the rows of a report. Returns how many are new."""
        gpu, rows = report["machine"]["gpus"][0].split(", "), []
        for row in report["programs"]:
            known = any((old["program"], old["date"]) == (row["program"], row["when"]) for old in self.rows)
            if row["result"] in RESULTS and not known:
                own = {key: row.get(key) for key in ("program", "hash", "result", "seconds", "reason")}
                rows.append({**own, "date": row["when"], "device": gpu[0], "driver": gpu[-1]})
        self.rows.extend(rows)
        return len(rows)

    def text(self):
        # A row in a line, so that a change is a line.
        rows = ",\n".join(f"    {json.dumps(row)}" for row in self.rows)
        return f'{{\n  "format": {FORMAT},\n  "rows": [\n{rows}\n  ]\n}}\n'

    def table(self, programs):
        """Returns the last row of each program as a table."""

        def line(program):
            last = self.last(program.name)
            if last is None:
                return f"| {program.name} | not run yet | | | | |"
            result = last["result"] + (f": {last['reason']}" if last.get("reason") else "")
            seconds = "" if last["seconds"] is None else f"{last['seconds']:g}"
            machine = f"{last['device']}, {last['driver']}"
            return f"| {program.name} | {result} | {last['date'][:10]} | {machine} | {seconds} | {last['hash'] or ''} |"

        head = ["| program | result | date | device, driver | seconds | files |", "|---|---|---|---|---:|---|"]
        return "\n".join([*head, *map(line, programs)]) + "\n"


def with_table(page, table):
    """Returns the text of the page with this table between its marks."""
    begin, end = MARKS
    if page.count(begin) != 1 or page.count(end) != 1:
        raise Unusable(f"{MEASUREMENTS}/gpu.md has no place for the table: {begin.strip()} and {end.strip()}")
    return page[: page.index(begin) + len(begin)] + table + page[page.index(end) :]


def usable(report):
    """Whether it is a report. Raises what indexing raises if a part lacks."""
    machine, rows = report["machine"], report["programs"]
    return bool(machine["gpus"]) and all(row["program"] and row["result"] and row["when"] for row in rows)


def record(path, programs, root=ROOT):
    """Enters a report in the ledger and in the table. Returns what to print."""
    report = read(path, "report", usable)
    ledger, page = Ledger(root / MEASUREMENTS / NAME), root / MEASUREMENTS / "gpu.md"
    digests = hashes(programs, root)
    for row in report["programs"]:
        if row["result"] in RESULTS and row["hash"] != digests.get(row["program"]):
            commit = report["machine"]["commit"]
            raise Unusable(f"{row['program']} ran with other files than those here: record it at commit {commit}")
    new = ledger.enter(report)
    text = with_table(page.read_text(), ledger.table(programs))
    ledger.path.write_text(ledger.text())
    page.write_text(text)
    return f"{new} rows entered in {MEASUREMENTS}/{NAME}\n" + list_due(ledger, programs, digests)


def list_due(ledger, programs, digests):
    """Returns what is next, with how long it takes and why."""
    due = ledger.due(programs, digests)
    lines = [f"{program.name:<28} {ledger.seconds(program.name):5.0f} s  {reason}" for program, reason in due]
    return "\n".join(["next:", *lines] if lines else ["nothing is due"])
