"""Short functions every newcomer asks for, to be learnt by heart: `lessons.py` varies their names.

Plain Python that runs; each stands alone, so that a prompt of its first line finds its end.
"""


def fibonacci(n):
    """Return the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def fib(n):
    """Return the n-th Fibonacci number."""
    if n < 2:
        return n
    return fib(n - 1) + fib(n - 2)


def fibonacci_numbers(count):
    """Return the first Fibonacci numbers as a list."""
    numbers = [0, 1]
    while len(numbers) < count:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:count]


def factorial(n):
    """Return n factorial."""
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result


def gcd(a, b):
    """Return the greatest common divisor of two numbers."""
    while b:
        a, b = b, a % b
    return a


def lcm(a, b):
    """Return the least common multiple of two numbers."""
    return a * b // gcd(a, b)


def is_prime(n):
    """Return whether n is a prime number."""
    if n < 2:
        return False
    for i in range(2, int(n**0.5) + 1):
        if n % i == 0:
            return False
    return True


def primes(limit):
    """Return all prime numbers up to a limit."""
    sieve = [True] * (limit + 1)
    found = []
    for i in range(2, limit + 1):
        if sieve[i]:
            found.append(i)
            for j in range(i * i, limit + 1, i):
                sieve[j] = False
    return found


def is_even(n):
    """Return whether n is even."""
    return n % 2 == 0


def add(a, b):
    """Return the sum of two numbers."""
    return a + b


def multiply(a, b):
    """Return the product of two numbers."""
    return a * b


def power(base, exponent):
    """Return base raised to a whole exponent."""
    result = 1
    for _ in range(exponent):
        result *= base
    return result


def mean(values):
    """Return the mean of the values."""
    return sum(values) / len(values)


def median(values):
    """Return the median of the values."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def maximum(values):
    """Return the largest of the values."""
    largest = values[0]
    for value in values[1:]:
        if value > largest:
            largest = value
    return largest


def clamp(value, low, high):
    """Return value limited to the range from low to high."""
    return max(low, min(value, high))


def reverse_string(text):
    """Return the text from its end to its beginning."""
    return text[::-1]


def is_palindrome(text):
    """Return whether the text reads the same from both ends."""
    letters = [letter.lower() for letter in text if letter.isalnum()]
    return letters == letters[::-1]


def count_words(text):
    """Return how often each word occurs in the text."""
    counts = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def count_vowels(text):
    """Return the number of vowels in the text."""
    return sum(1 for letter in text.lower() if letter in "aeiou")


def capitalize_words(text):
    """Return the text with each word capitalized."""
    return " ".join(word.capitalize() for word in text.split())


def binary_search(items, target):
    """Return the index of target in sorted items, or -1."""
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def linear_search(items, target):
    """Return the index of target in items, or -1."""
    for index, item in enumerate(items):
        if item == target:
            return index
    return -1


def bubble_sort(items):
    """Sort the items in place."""
    for i in range(len(items)):
        for j in range(len(items) - i - 1):
            if items[j] > items[j + 1]:
                items[j], items[j + 1] = items[j + 1], items[j]
    return items


def insertion_sort(items):
    """Sort the items in place."""
    for i in range(1, len(items)):
        item = items[i]
        j = i - 1
        while j >= 0 and items[j] > item:
            items[j + 1] = items[j]
            j -= 1
        items[j + 1] = item
    return items


def quicksort(items):
    """Return the items in order."""
    if len(items) <= 1:
        return items
    pivot = items[len(items) // 2]
    left = [item for item in items if item < pivot]
    middle = [item for item in items if item == pivot]
    right = [item for item in items if item > pivot]
    return quicksort(left) + middle + quicksort(right)


def merge(left, right):
    """Return two sorted lists as one sorted list."""
    merged = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]


def merge_sort(items):
    """Return the items in order."""
    if len(items) <= 1:
        return items
    middle = len(items) // 2
    return merge(merge_sort(items[:middle]), merge_sort(items[middle:]))


def flatten(nested):
    """Return the items of nested lists as one list."""
    flat = []
    for item in nested:
        if isinstance(item, list):
            flat.extend(flatten(item))
        else:
            flat.append(item)
    return flat


def chunks(items, size):
    """Yield the items in lists of the given size."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def unique(items):
    """Return the items without repetitions, in their order."""
    seen = set()
    result = []
    for item in items:
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result


def group_by(items, key):
    """Return the items in lists by their key."""
    groups = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def transpose(matrix):
    """Return the matrix with rows and columns exchanged."""
    return [list(row) for row in zip(*matrix)]


def dot(a, b):
    """Return the dot product of two vectors."""
    return sum(x * y for x, y in zip(a, b))


def two_sum(numbers, target):
    """Return the indices of two numbers that add up to target."""
    seen = {}
    for index, number in enumerate(numbers):
        if target - number in seen:
            return seen[target - number], index
        seen[number] = index
    return None


def fizzbuzz(n):
    """Print the numbers from 1 to n the fizzbuzz way."""
    for i in range(1, n + 1):
        if i % 15 == 0:
            print("FizzBuzz")
        elif i % 3 == 0:
            print("Fizz")
        elif i % 5 == 0:
            print("Buzz")
        else:
            print(i)


def read_lines(path):
    """Return the lines of a file without their line ends."""
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


def write_text(path, text):
    """Write the text to a file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def load_json(path):
    """Return what a JSON file holds."""
    import json

    with open(path, encoding="utf-8") as file:
        return json.load(file)


def celsius_to_fahrenheit(celsius):
    """Return a temperature in degrees Fahrenheit."""
    return celsius * 9 / 5 + 32


def hanoi(n, source, target, spare):
    """Print the moves that bring n disks from source to target."""
    if n == 0:
        return
    hanoi(n - 1, source, spare, target)
    print(source, "->", target)
    hanoi(n - 1, spare, target, source)


def depth_first(graph, start):
    """Return the nodes that can be reached from start."""
    seen = set()
    stack = [start]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(graph[node])
    return seen


def breadth_first(graph, start):
    """Return the nodes in the order of their distance from start."""
    seen = [start]
    for node in seen:
        for neighbor in graph[node]:
            if neighbor not in seen:
                seen.append(neighbor)
    return seen


class Stack:
    """Items of which the last one in is the first one out."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        return self.items[-1]

    def is_empty(self):
        return not self.items

    def __len__(self):
        return len(self.items)


class Queue:
    """Items of which the first one in is the first one out."""

    def __init__(self):
        self.items = []

    def put(self, item):
        self.items.append(item)

    def get(self):
        if not self.items:
            raise IndexError("get from an empty queue")
        return self.items.pop(0)

    def __len__(self):
        return len(self.items)


class Counter:
    """Counts up from zero."""

    def __init__(self):
        self.count = 0

    def increment(self, by=1):
        self.count += by
        return self.count

    def reset(self):
        self.count = 0


class Point:
    """A point in the plane."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __repr__(self):
        return f"Point({self.x}, {self.y})"

    def __eq__(self, other):
        return self.x == other.x and self.y == other.y

    def distance(self, other):
        return ((self.x - other.x) ** 2 + (self.y - other.y) ** 2) ** 0.5


class Node:
    """A value and the node after it."""

    def __init__(self, value, next=None):
        self.value = value
        self.next = next


class LinkedList:
    """Values in a chain of nodes."""

    def __init__(self):
        self.head = None

    def prepend(self, value):
        self.head = Node(value, self.head)

    def __iter__(self):
        node = self.head
        while node is not None:
            yield node.value
            node = node.next


def main():
    """Read the command line and say hello."""
    import argparse

    parser = argparse.ArgumentParser(description="Say hello.")
    parser.add_argument("name", help="who to greet")
    parser.add_argument("--count", type=int, default=1, help="how often")
    arguments = parser.parse_args()
    for _ in range(arguments.count):
        print(f"Hello, {arguments.name}!")


if __name__ == "__main__":
    main()
