"""Small programming tasks with a right and a plausible wrong solution each, in the forms that data sets use."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent
from typing import Any


@dataclass(frozen=True)
class CodeTask:
    """`right` passes all `test_cases`; `wrong` passes some of them, mostly."""

    name: str
    test_cases: dict[str, Any]
    right: str
    wrong: str


def _program(name: str, cases: list[tuple[Any, Any]], right: str, wrong: str) -> CodeTask:
    test_cases = {"inputs": [given for given, _ in cases], "outputs": [expected for _, expected in cases]}
    return CodeTask(name, test_cases, dedent(right), dedent(wrong))


def _function(name: str, cases: list[tuple[Any, Any]], right: str, wrong: str) -> CodeTask:
    task = _program(name, cases, right, wrong)
    return CodeTask(name, {**task.test_cases, "fn_name": name}, task.right, task.wrong)


PROGRAMS = [
    _program(
        "sum of two", [("1 2\n", "3\n"), ("-5 5", "0"), ("1000000000000 1", "1000000000001")],
        "a, b = map(int, input().split())\nprint(a + b)",
        "a, b = input().split()\nprint(a + b)",
    ),
    _program(
        "sum of many lines", [("3\n1\n2\n3\n", "6\n"), ("1\n7\n", "7\n"), ("0\n", "0\n")],
        "print(sum(int(input()) for _ in range(int(input()))))",
        "n = int(input())\nprint(sum(int(input()) for _ in range(n - 1)))",
    ),
    _program(
        "lines as lists", [(["3", "5"], ["3", "4", "5"]), (["2", "2"], ["2"])],
        "a, b = int(input()), int(input())\nfor i in range(a, b + 1): print(i)",
        "a, b = int(input()), int(input())\nfor i in range(a, b): print(i)",
    ),
    _program(
        "reverse text", [("abc\n", "cba\n"), ("é über\n", "rebü é\n"), ("\n", "\n")],
        "print(input()[::-1])",
        "print(''.join(sorted(input(), reverse=True)))",
    ),
    _program(
        "yes or no", [("4\n", "YES\n"), ("7\n", "NO\n"), ("0\n", "YES\n")],
        "print('NO' if int(input()) % 2 else 'YES')",
        "print('No' if int(input()) % 2 else 'Yes')",
    ),
    _program(
        "circle area", [("1\n", "3.141592653589793\n"), ("2.5\n", "19.634954084936208\n")],
        "import math\nprint('%.9f' % (math.pi * float(input()) ** 2))",
        "print(3.14 * float(input()) ** 2)",
    ),
    _program(
        "primes below", [("10\n", "2 3 5 7\n"), ("2\n", "\n"), ("30\n", "2 3 5 7 11 13 17 19 23 29\n")],
        "n = int(input())\nprint(*[p for p in range(2, n) if all(p % d for d in range(2, int(p ** .5) + 1))])",
        "n = int(input())\nprint(*[p for p in range(2, n) if all(p % d for d in range(2, int(p ** .5)))])",
    ),
    _program(
        "factorial", [("5\n", "120\n"), ("0\n", "1\n"), ("30\n", "265252859812191058636308480000000\n")],
        "import math\nprint(math.factorial(int(input())))",
        "r = 1.0\nfor i in range(1, int(input()) + 1): r *= i\nprint(int(r))",
    ),
    _program(
        "word counts", [("b a b c a b\n", "a 2\nb 3\nc 1\n"), ("x\n", "x 1\n")],
        """
        from collections import Counter
        for word, count in sorted(Counter(input().split()).items()):
            print(word, count)
        """,
        """
        from collections import Counter
        for word, count in Counter(input().split()).most_common():
            print(word, count)
        """,
    ),
    _program(
        "matrix transpose", [("2 3\n1 2 3\n4 5 6\n", "1 4\n2 5\n3 6\n"), ("1 1\n9\n", "9\n")],
        """
        n, m = map(int, input().split())
        rows = [input().split() for _ in range(n)]
        for column in zip(*rows):
            print(*column)
        """,
        """
        n, m = map(int, input().split())
        rows = [input().split() for _ in range(n)]
        for row in rows:
            print(*row[::-1])
        """,
    ),
    _program(
        "brackets", [("([]{})\n", "balanced\n"), ("([)]\n", "unbalanced\n"), ("((\n", "unbalanced\n")],
        """
        stack, good = [], True
        for c in input():
            if c in '([{':
                stack.append(c)
            elif not stack or stack.pop() + c not in ('()', '[]', '{}'):
                good = False
        print('balanced' if good and not stack else 'unbalanced')
        """,
        """
        text = input()
        good = all(text.count(a) == text.count(b) for a, b in ('()', '[]', '{}'))
        print('balanced' if good else 'unbalanced')
        """,
    ),
    _program(
        "fibonacci modulo", [("10\n", "55\n"), ("1\n", "1\n"), ("100000\n", "911435502\n")],
        """
        a, b = 0, 1
        for _ in range(int(input())):
            a, b = b, (a + b) % 1000000007
        print(a)
        """,
        """
        a, b = 0, 1
        for _ in range(int(input())):
            a, b = b, (a + b) % 1000000009
        print(a)
        """,
    ),
    _program(
        "read all at once", [("5 3\n8\n\n1", "1 3 5 8\n"), ("2 1", "1 2")],
        "import sys\nprint(*sorted(map(int, sys.stdin.read().split())))",
        "import sys\nprint(*sorted(sys.stdin.readline().split()))",
    ),
    _program(
        "deep recursion", [("5\n", "15\n"), ("3000\n", "4501500\n")],
        """
        import sys
        sys.setrecursionlimit(10000)
        def total(n):
            return n + total(n - 1) if n else 0
        print(total(int(input())))
        """,
        "def total(n):\n    return n + total(n - 1) if n else 0\nprint(total(int(input())))",
    ),
    _program(
        "shortest path", [("3 2\n1 2\n2 3\n", "2\n"), ("3 1\n1 2\n", "-1\n"), ("4 4\n1 3\n3 4\n1 2\n2 4\n", "2\n")],
        """
        from collections import deque
        n, m = map(int, input().split())
        edges = {i: [] for i in range(1, n + 1)}
        for _ in range(m):
            a, b = map(int, input().split())
            edges[a].append(b); edges[b].append(a)
        seen, queue = {1: 0}, deque([1])
        while queue:
            node = queue.popleft()
            for other in edges[node]:
                if other not in seen:
                    seen[other] = seen[node] + 1
                    queue.append(other)
        print(seen.get(n, -1))
        """,
        """
        n, m = map(int, input().split())
        for _ in range(m):
            input()
        print(m if m >= n - 1 else -1)
        """,
    ),
    _program(
        "hexadecimal", [("255\n", "ff\n"), ("0\n", "0\n"), ("4096\n", "1000\n")],
        "print(format(int(input()), 'x'))",
        "print(hex(int(input())))",
    ),
    _program(
        "mean", [("1 2\n", "1.5\n"), ("1 1 2\n", "1.3333333333333333\n"), ("3\n", "3.0\n")],
        "numbers = list(map(float, input().split()))\nprint(sum(numbers) / len(numbers))",
        "numbers = list(map(float, input().split()))\nprint(round(sum(numbers) / len(numbers), 2))",
    ),
    _program(
        "triangle of stars", [("3\n", "  *\n ***\n*****\n"), ("1\n", "*\n")],
        "n = int(input())\nfor i in range(n): print(' ' * (n - i - 1) + '*' * (2 * i + 1))",
        "n = int(input())\nfor i in range(n): print('*' * (2 * i + 1))",
    ),
    _program(
        "until end of file", [("1\n2\n3\n", "1\n4\n9\n"), ("", "")],
        """
        while True:
            try:
                print(int(input()) ** 2)
            except EOFError:
                break
        """,
        "while True:\n    print(int(input()) ** 2)",
    ),
    _program(
        "main guard", [("3\n", "9\n"), ("-4\n", "16\n")],
        "def main():\n    print(int(input()) ** 2)\n\nif __name__ == '__main__':\n    main()",
        "def main():\n    print(int(input()) * 2)\n\nif __name__ == '__main__':\n    main()",
    ),
    _program(
        "large input", [("\n".join(["20000", *map(str, range(20000))]), "199990000\n"), ("1\n5", "5\n")],
        "import sys\nn, *numbers = map(int, sys.stdin.read().split())\nprint(sum(numbers[:n]))",
        "import sys\nnumbers = list(map(int, sys.stdin.read().split()))\nprint(sum(numbers))",
    ),
]  # fmt: skip
"""Standard input to standard output."""

FUNCTIONS = [
    _function(
        "add", [([1, 2], 3), ([-1, 1], 0), ([10**20, 1], 10**20 + 1)],
        "def add(a, b):\n    return a + b",
        "def add(a, b):\n    return float(a) + b",
    ),
    _function(
        "twoSum", [([[2, 7, 11, 15], 9], [0, 1]), ([[3, 2, 4], 6], [1, 2])],
        """
        class Solution:
            def twoSum(self, nums: List[int], target: int) -> List[int]:
                seen = {}
                for i, x in enumerate(nums):
                    if target - x in seen:
                        return [seen[target - x], i]
                    seen[x] = i
        """,
        """
        class Solution:
            def twoSum(self, nums: List[int], target: int) -> List[int]:
                for i, x in enumerate(nums):
                    if target - x in nums:
                        return [i, nums.index(target - x)]
        """,
    ),
    _function(
        "isPalindrome", [('"abba"', "true"), ('"abc"', "false"), ('""', "true")],
        "class Solution:\n    def isPalindrome(self, s: str) -> bool:\n        return s == s[::-1]",
        "class Solution:\n    def isPalindrome(self, s: str) -> bool:\n        return int(s == s[::-1])",
    ),
    _function(
        "merge", [("[1, 3]\n[2]", "[1, 2, 3]"), ("[]\n[]", "[]"), ("[5]\n[1, 9]\n", "[1, 5, 9]")],
        "def merge(a, b):\n    return sorted(a + b)",
        "def merge(a, b):\n    return a + b",
    ),
    _function(
        "describe", [([3], ["odd"]), ([4], ["even"]), ([0], ["even"])],
        "def describe(n):\n    return 'odd' if n % 2 else 'even'",
        "def describe(n):\n    return 'even' if n % 2 else 'odd'",
    ),
    _function(
        "singletons", [([3], [[3]]), ([4], [[4]])],
        "def singletons(n):\n    return [n]",
        "def singletons(n):\n    return [n, n]",
    ),
    _function(
        "divmod_pair", [([7, 2], [3, 1]), ([-7, 2], [-4, 1])],
        "def divmod_pair(a, b):\n    return divmod(a, b)",
        "def divmod_pair(a, b):\n    return int(a / b), a % b",
    ),
    _function(
        "counts", [(["abca"], {"a": 2, "b": 1, "c": 1}), ([""], {})],
        "from collections import Counter\ndef counts(text):\n    return Counter(text)",
        "def counts(text):\n    return {c: 1 for c in text}",
    ),
    _function(
        "squares_by_number", [([3], {"1": 1, "2": 4, "3": 9})],
        "def squares_by_number(n):\n    return {i: i * i for i in range(1, n + 1)}",
        "def squares_by_number(n):\n    return {i: i * i for i in range(n + 1)}",
    ),
    _function(
        "nothing", [([1], None), ([2], None)],
        "def nothing(x):\n    pass",
        "def nothing(x):\n    return 0",
    ),
    _function(
        "mean", [([[1, 2]], 1.5), ([[1, 1, 2]], 1.3333333333), ([[2, 2]], 2.0)],
        "def mean(numbers):\n    return sum(numbers) / len(numbers)",
        "def mean(numbers):\n    return sum(numbers) // len(numbers)",
    ),
    _function(
        "root", [([16], 4), ([2], 1), ([10**30], 10**15)],
        "import math\ndef root(n):\n    return math.isqrt(n)",
        "import math\ndef root(n):\n    return math.sqrt(n)",
    ),
    _function(
        "flatten", [([[1, [2, [3, []]]]], [1, 2, 3]), ([[]], [])],
        """
        def flatten(value):
            return [x for item in value for x in (flatten(item) if isinstance(item, list) else [item])]
        """,
        "def flatten(value):\n    return [x for item in value for x in (item if isinstance(item, list) else [item])]",
    ),
    _function(
        "join_words", [([["a", "b"], ", "], "a, b"), ([["ü", "\n"], "é"], "üé\n")],
        "def join_words(words, separator):\n    print('joining', words)\n    return separator.join(words)",
        "def join_words(words, separator):\n    return ' '.join(words)",
    ),
    _function(
        "with_default", [([], 5), ([7], 8)],
        "def with_default(n=4):\n    return n + 1",
        "def with_default(n=5):\n    return n + 1",
    ),
    _function(
        "coins", [([[1, 2, 5], 11], 3), ([[2], 3], -1), ([[1], 0], 0)],
        """
        class Solution:
            def __init__(self):
                self.best = {0: 0}

            def coins(self, coins: List[int], amount: int) -> int:
                for total in range(1, amount + 1):
                    options = [self.best[total - c] for c in coins if total - c in self.best]
                    if options:
                        self.best[total] = min(options) + 1
                return self.best.get(amount, -1)
        """,
        """
        class Solution:
            def coins(self, coins: List[int], amount: int) -> int:
                count = 0
                for c in sorted(coins, reverse=True):
                    count += amount // c
                    amount %= c
                return -1 if amount else count + 1
        """,
    ),
    _function(
        "matrix", [([2], [[1, 0], [0, 1]]), ([1], [[1]])],
        "def matrix(n):\n    return tuple(tuple(int(i == j) for j in range(n)) for i in range(n))",
        "def matrix(n):\n    return [[i == j for j in range(n)] for i in range(n)]",
    ),
    _function(
        "calls_itself", [([3], 6), ([900], 405450)],
        "def calls_itself(n):\n    return n + calls_itself(n - 1) if n else 0",
        "def calls_itself(n):\n    return n + calls_itself(n - 1) if n > 1 else 0",
    ),
    _function(
        "pops", [([[1, 2, 3]], 3), ([[4]], 4)],
        "def pops(items):\n    return items.pop()",
        "def pops(items):\n    return items.pop(0)",
    ),
    _function(
        "apply_rules", [([{"a": 1}, "a"], 1), ([{"a": {"b": None}}, "a"], {"b": None}), ([{}, "a"], None)],
        "def apply_rules(rules, key):\n    return rules.get(key)",
        "def apply_rules(rules, key):\n    return rules.get(key, '')",
    ),
    _function(
        "longest", [(["pwwkew"], 3), (["bbbb"], 1), ([""], 0)],
        """
        class Solution:
            def longest(self, s: str) -> int:
                start, best, last = 0, 0, {}
                for i, c in enumerate(s):
                    start = max(start, last.get(c, -1) + 1)
                    last[c] = i
                    best = max(best, i - start + 1)
                return best
        """,
        "class Solution:\n    def longest(self, s: str) -> int:\n        return len(set(s))",
    ),
]  # fmt: skip
"""Arguments to results; top-level functions and methods of a class Solution."""
