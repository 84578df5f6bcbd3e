"""Placing the names of points so that no name covers another name or a mark. Plain geometry in pixels."""

from collections.abc import Iterator, Sequence
from math import hypot

Box = tuple[float, float, float, float]  # left, bottom, right, top
Point = tuple[float, float]

# right above first: a frontier falls to the right, so its line leaves a point rightwards or downwards
DIRECTIONS = ((1, 1), (1, 0), (-1, -1), (-1, 0), (0, 1), (0, -1), (-1, 1), (1, -1))
DISTANCES = (7.0, 10.0, 16.0, 26.0, 38.0)
CLOSE = 12.0  # a label further away gets a leader, which covers nothing either


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def place(
    points: Sequence[Point], sizes: Sequence[Point], frame: Box, marks: Sequence[Box], lines: Sequence[Box] = ()
) -> list[Box | None]:
    """Returns the box of every label, in the order of importance; None for a label without room.

    `marks` are never covered, `lines` only if there is no other place.
    """
    placed: list[Box] = []
    boxes: list[Box | None] = []
    for point, size in zip(points, sizes, strict=True):
        taken = [*marks, *placed]
        others = [box for box in taken if not _holds(box, point)]
        choices = [
            box
            for box in _choices(point, size)
            if _inside(box, frame)
            and not _hits(box, taken)
            and not any(_hits(bit, others) for bit in leader(box, point))
        ]
        best = next((box for box in choices if not _hits(box, lines)), choices[0] if choices else None)
        if best is not None:
            placed += [best, *leader(best, point)]
        boxes.append(best)
    return boxes


def leader(box: Box, point: Point) -> list[Box]:
    """Returns the line from a label to its point as small boxes; none if they are close."""
    if apart(box, point) <= CLOSE:
        return []
    end = nearest(box, point)
    shares = [step / 12 for step in range(3, 12)]  # it starts outside the mark
    spots = [(point[0] + (end[0] - point[0]) * share, point[1] + (end[1] - point[1]) * share) for share in shares]
    return [(x - 0.5, y - 0.5, x + 0.5, y + 0.5) for x, y in spots]


def nearest(box: Box, point: Point) -> Point:
    """Returns the point of a box that is nearest to a point: the end of a leader."""
    return min(max(point[0], box[0]), box[2]), min(max(point[1], box[1]), box[3])


def apart(box: Box, point: Point) -> float:
    end = nearest(box, point)
    return hypot(end[0] - point[0], end[1] - point[1])


def _choices(point: Point, size: Point) -> Iterator[Box]:
    width, height = size
    for distance in DISTANCES:
        for across, up in DIRECTIONS:
            reach = distance * (0.7 if across and up else 1.0)
            left = point[0] + across * reach + (across - 1) * width / 2
            bottom = point[1] + up * reach + (up - 1) * height / 2
            yield left, bottom, left + width, bottom + height


def _holds(box: Box, point: Point) -> bool:
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


def _inside(box: Box, frame: Box) -> bool:
    return frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _hits(box: Box, others: Sequence[Box]) -> bool:
    return any(overlap(box, other) for other in others)
