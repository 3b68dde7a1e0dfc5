"""Finds the tensor core products that an old assembler gets wrong, in PTX.

A Hopper product (`wgmma`) runs on after it is issued. Where its left side is in registers, and not in shared memory,
those registers must not be written before it has read them. Triton waits for the product before last in a pipelined
loop, and assemblers before CUDA 13.3 then reuse the registers of the last (triton-lang/triton#9433, #11781): silently
wrong sums. Products whose left side was computed therefore stay out of such loops.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_LABEL = re.compile(r"^(\$\w+):")
_BRANCH = re.compile(r"^(@\S+\s+)?bra(?:\.uni)?\s+(\$\w+);")
_LEAVE = re.compile(r"^(?:ret|exit|trap);")
_WAIT = re.compile(r"^wgmma\.wait_group\S*\s+(\d+)")
_ASYNCHRONOUS_COPY = re.compile(r"^(?:@\S+\s+)?cp\.async\.")

# A product whose left side, after the accumulators, is a list of registers and not a descriptor.
_REGISTER_PRODUCT = re.compile(r"wgmma\.mma_async[^{]*\{[^}]*\},\s*\{")


@dataclass
class _Block:
    """Statements without a jump into or out of their middle, and the blocks that may run next."""

    statements: list[str] = field(default_factory=list)
    following: list[int] = field(default_factory=list)

    @property
    def is_pipelined(self) -> bool:
        """Whether it starts work for a later iteration, or leaves a product unfinished for one."""
        waits = (_WAIT.match(statement) for statement in self.statements)
        return any(_ASYNCHRONOUS_COPY.match(s) for s in self.statements) or any(w and int(w[1]) for w in waits)

    @property
    def num_register_products(self) -> int:
        return sum(bool(_REGISTER_PRODUCT.search(statement)) for statement in self.statements)

    @property
    def num_unfinished(self) -> int:
        """Register products whose own wait, in this block, lets them run on."""
        unfinished = waiting = 0
        for statement in self.statements:
            waiting += bool(_REGISTER_PRODUCT.search(statement))
            if wait := _WAIT.match(statement):
                unfinished += waiting if int(wait[1]) else 0
                waiting = 0
        return unfinished


def count_register_products(ptx: str) -> int:
    """Number of warpgroup products whose left side is in registers."""
    return len(_REGISTER_PRODUCT.findall(ptx))


def count_pipelined_register_products(ptx: str) -> int:
    """Number of them that may still read their registers while those of a later one are written.

    These are the products in a software-pipelined loop (one that copies asynchronously, or waits for all but the last
    products), and those outside that are not waited for, as in such a loop that was unrolled.
    """
    blocks = _blocks(ptx)
    loops = list(_loops(blocks))
    found = 0
    for number, block in enumerate(blocks):
        own = [loop for loop in loops if number in loop]
        others = [loop for loop in loops if number not in loop]
        # A loop's own statements: what is in a loop inside it, beside the product, does not pipeline the product.
        pipelined = any(
            blocks[member].is_pipelined
            for loop in own
            for member in loop
            if not any(member in other and other < loop for other in others)
        )
        found += block.num_register_products if pipelined else block.num_unfinished
    return found


def _blocks(ptx: str) -> list[_Block]:
    blocks, labels, jumps = [_Block()], {}, []
    falls_through = True

    def begin_block() -> None:
        if falls_through:
            blocks[-1].following.append(len(blocks))
        blocks.append(_Block())

    for line in ptx.splitlines():
        statement = line.strip()
        if label := _LABEL.match(statement):
            begin_block()
            labels[label[1]] = len(blocks) - 1
            falls_through = True
        elif branch := _BRANCH.match(statement):
            jumps.append((len(blocks) - 1, branch[2]))
            falls_through = bool(branch[1])
            begin_block()
        elif _LEAVE.match(statement):
            falls_through = False
        else:
            blocks[-1].statements.append(statement)
    for number, label_name in jumps:
        blocks[number].following.append(labels[label_name])
    return blocks


def _loops(blocks: list[_Block]) -> Iterator[frozenset[int]]:
    """Natural loops: for each jump back to a block that every path to it passes, the blocks between."""
    preceding: list[list[int]] = [[] for _ in blocks]
    for number, block in enumerate(blocks):
        for following in block.following:
            preceding[following].append(number)
    dominators = _dominators(blocks, preceding)
    bodies: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for head in block.following:
            if head not in dominators[number]:
                continue
            body, pending = bodies.setdefault(head, {head}), [number]
            while pending:
                member = pending.pop()
                if member not in body:
                    body.add(member)
                    pending.extend(preceding[member])
    return (frozenset(body) for body in bodies.values())


def _dominators(blocks: list[_Block], preceding: list[list[int]]) -> list[set[int]]:
    """For each block the blocks on every path to it, itself included."""
    everything = set(range(len(blocks)))
    dominators = [{0}, *(set(everything) for _ in blocks[1:])]
    changed = True
    while changed:
        changed = False
        for number in range(1, len(blocks)):
            through = [dominators[before] for before in preceding[number]]
            updated = {number} | (set.intersection(*through) if through else set())
            if updated != dominators[number]:
                dominators[number], changed = updated, True
    return dominators
