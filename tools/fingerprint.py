"""Says whether a change of the CUDA sources changed what they compute.

    python tools/fingerprint.py code build/python/octavo/_core.abi3.so --json before-code.json
    python tools/fingerprint.py calls --json before-calls.json            # on a machine with a GPU
    python tools/fingerprint.py compare before-code.json after-code.json

``code`` hashes the machine code of every kernel, without the names of functions, and notes its registers,
its spills and its shared memory. ``calls`` runs some 400 seeded calls over all operators and hashes their
results; it notes which kernels served each call. ``compare`` says what differs: a move of code must leave
the hashes of the machine code equal, and a deletion those of the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from _machine_code import demangle, read_instructions, read_usages

Report = dict[str, Any]


def normalize(lines: list[str]) -> str:
    """The instructions, with every function that they name replaced by its place among those named."""
    places: dict[str, str] = {}

    def place(match: re.Match[str]) -> str:
        return places.setdefault(match[0], f"function{len(places)}")

    code = [re.sub(r"/\*[0-9a-f]{4,}\*/", "", line).strip() for line in lines]
    return "\n".join(re.sub(r"\.?\$?\b_Z\w+(?:\$\w+)?", place, line) for line in code if line)


def read_code(library: Path) -> Report:
    """Disassemble every kernel of a library."""
    usages, kernels = read_usages(library), read_instructions(library)
    names = demangle([function.name for function in kernels])
    rows = []
    for (function, lines), name in zip(kernels.items(), names, strict=True):
        code = normalize(lines)
        usage = usages[function]
        rows.append(
            {
                "name": name,
                "architecture": function.architecture,
                "sha256": hashlib.sha256(code.encode()).hexdigest(),
                "registers": usage["reg"],
                "stack_bytes": usage["stack"],
                "shared_bytes": usage["shared"],
                "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
            }
        )
    rows.sort(key=lambda row: (row["architecture"], row["name"]))
    return {"kind": "code", "kernels": rows}


def compare_code(before: Report, after: Report) -> int:
    """Pair kernels by their code; what is left over on either side has changed, come or gone."""

    def by_hash(report: Report) -> dict[tuple[str, str], list[Report]]:
        found: dict[tuple[str, str], list[Report]] = {}
        for kernel in report["kernels"]:
            found.setdefault((kernel["architecture"], kernel["sha256"]), []).append(kernel)
        return found

    old, new = by_hash(before), by_hash(after)
    equal = sum(min(len(old[key]), len(new[key])) for key in old.keys() & new.keys())
    print(f"{len(before['kernels'])} kernels before, {len(after['kernels'])} after, {equal} with equal code")
    left_over = 0
    for title, mine, other in (("only before", old, new), ("only after", new, old)):
        for key, kernels in mine.items():
            for kernel in kernels[len(other.get(key, [])) :]:
                left_over += 1
                print(
                    f"{title}: {kernel['architecture']} {kernel['name']}: {kernel['registers']} registers, "
                    f"{kernel['spills']} spills, {kernel['stack_bytes']} bytes of stack"
                )
    return 1 if left_over else 0


def compare_calls(before: Report, after: Report) -> int:
    if before["device"] != after["device"]:
        print(f"different devices: {before['device']} and {after['device']}")
    old = {row["call"]: row for row in before["calls"]}
    new = {row["call"]: row for row in after["calls"]}
    changed = [call for call in old if call in new and old[call]["sha256"] != new[call]["sha256"]]
    missing = sorted(old.keys() ^ new.keys())
    print(f"{len(old)} calls before, {len(new)} after, {len(changed)} with other results")
    for call in changed:
        print(f"other results: {call}: {old[call]['kernels']}, now {new[call]['kernels']}")
    for call in missing:
        print(f"on one side only: {call}")
    served = Counter(
        (tuple(old[call]["kernels"]), tuple(new[call]["kernels"])) for call in old if call in new
    )
    for (was, now), count in sorted(served.items()):
        if was != now:
            print(f"{count} calls: {', '.join(was) or 'no kernel'} -> {', '.join(now) or 'no kernel'}")
    return 1 if changed or missing else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    code = commands.add_parser("code", help="the machine code of a library's kernels")
    code.add_argument("library", type=Path)
    calls = commands.add_parser("calls", help="the results of seeded calls; needs a GPU and PyTorch")
    calls.add_argument("--count", type=int, default=420, help="how many calls (default: %(default)s)")
    for command in (code, calls):
        command.add_argument("--json", type=Path, required=True, help="where the report goes")
    compare = commands.add_parser("compare", help="two reports of one kind")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    options = parser.parse_args()

    if options.command == "compare":
        before, after = (json.loads(path.read_text()) for path in (options.before, options.after))
        if before["kind"] != after["kind"]:
            parser.error("the two reports are of different kinds")
        return (compare_code if before["kind"] == "code" else compare_calls)(before, after)
    if options.command == "code":
        report = read_code(options.library)
    else:
        from _fingerprint_calls import run_calls

        report = run_calls(options.count)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
