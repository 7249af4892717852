"""Chat templates that hang, fill memory or fail in odd ways: each ends in one `ModelError`."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from kvq.errors import ModelError
from kvq_models.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "hello"}]
DOUBLED = (
    "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = NEXT %}{% endfor %}"
)


def doubled(start: str, following: str, end: str = "{{ ns.x }}") -> str:
    return DOUBLED.replace("START", start).replace("NEXT", following) + end


HOSTILE = {
    "nested ranges": "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "nested ranges that skip": "{% for a in range(99999) %}{% for b in range(99999) if false %}"
    "{% endfor %}{% endfor %}",
    "nested sums": "{% for a in range(99999) %}{% set x = range(99999)|sum %}{% endfor %}",
    "a long text": "{{ 'a' * 3000000000 }}",
    "a long list": "{{ ([1] * 300000000)|length }}",
    "a list of a long text": "{{ [('a' * 9000000)] * 1000 }}",
    "a long range": "{{ range(1000000000)|list }}",
    "a large number": "{{ 9 ** (9 ** 9) }}",
    "a quotient of large numbers": "{% set x = 2 ** 4000000 %}{{ x * x // (x + 1) > 0 }}",
    "a sum of lists": "{{ ([[0]] * 200000)|sum(start=[])|length }}",
    "bytes of a text": "{{ 'a'.encode().ljust(3000000000)|length }}",
    "bytes of a number": "{{ (5).to_bytes(3000000000, 'big')|length }}",
    "a search from the right": "{% set x = 'a' * 500000 %}{{ (x ~ x).rfind('ab' ~ x) }}",
    "a text without many letters": "{% set x = 'b' * 5000000 ~ 'a' %}"
    "{{ (x|replace('b', 'a')).strip(x) }}",
    "a long list in another": "{{ range(100000)|select('in', range(100000)|list)|list|length }}",
    "many places to compile": "{{ a }}" * 149000,
    "too long": "{{ a }}" * 750000,
    "lipsum": "{{ lipsum(n=100000) }}",
    "width by format": "{{ '%2000000000d'|format(1) }}",
    "width by %": "{{ '%2000000000d' % 1 }}",
    "width by star": "{{ '%*d' % (2000000000, 1) }}",
    "width by method": "{{ '{:>2000000000}'.format(1) }}",
    "width by argument": "{{ '{:>{}}'.format(1, 2000000000) }}",
    "precision": "{{ '%.2000000000f' % 1.5 }}",
    **{
        f"by {name}": "{{ 'a'.NAME(3000000000) }}".replace("NAME", name)
        for name in ("center", "ljust", "rjust", "zfill")
    },
    "by tabs": r"{{ '\t'.expandtabs(2000000000) }}",
    "by the filter center": "{{ 'a'|center(3000000000) }}",
    "by indent": r"{{ 'a\nb'|indent(2000000000) }}",
    "by json": "{{ {'a': 1}|tojson(indent=2000000000) }}",
    "by batch": "{{ [1]|batch(2000000000, 'a')|list }}",
    "by slice": "{{ [1]|slice(2000000000)|list }}",
    "by replace": "{% set x = 'a' * 100000 %}{{ x.replace('a', x).replace('a', x) }}",
    "by the filter replace": "{% set x = 'a' * 100000 %}{{ x|replace('a', x)|replace('a', x) }}",
    "by join": "{% set x = 'a' * 1000000 %}{{ range(99999)|join(x) }}",
    "by the method join": "{% set x = 'a' * 1000000 %}{{ x.join(range(99999)|map('string')) }}",
    "by join of what comes one by one": "{{ ([''] * 400000)|reject|join('x' * 3000) }}",
    "by map": "{% set x = 'a' * 1000000 %}{{ range(99999)|map('replace', '1', x)|join }}",
    "doubling by ~": doubled("'ab'", "ns.x ~ ns.x"),
    "doubling by +": doubled("'ab'", "ns.x + ns.x"),
    "doubling a list by +": doubled("['ab']", "ns.x + ns.x"),
    "doubling a list of a long text": "{% set ns = namespace(x=['a' * 1000000]) %}"
    "{% for i in range(17) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|join }}",
    "doubling by a list": doubled("['ab']", "[ns.x, ns.x]"),
    "doubling by a list, as JSON": doubled("['ab']", "[ns.x, ns.x]", "{{ ns.x|tojson }}"),
    "doubling by a dict": doubled("1", "{'a': ns.x, 'b': ns.x}"),
    "doubling by dict()": doubled("1", "dict(a=ns.x, b=ns.x)"),
    "doubling by namespace()": doubled("1", "namespace(a=ns.x, b=ns.x)"),
    "doubling by a block": "{% set x %}ab{% endset %}"
    + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60
    + "{{ x }}",
    "doubling by a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "much of a template's own text": "{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop that calls itself": "{% set x = [1] %}{% for i in x recursive %}{{ loop(x) }}"
    "{% endfor %}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "a division by zero": "{{ 1 / 0 }}",
    "an unknown name": "{{ messages[0].content.nothing.here }}",
    "an unknown codec": "{{ 'a'.encode('nothing') }}",
    "an unknown filter": "{{ 'a'|nothing }}",
    "an unknown test": "{{ 'a' is nothing }}",
    "a template that is elsewhere": "{% include 'x' %}",
    "wrong arguments": "{{ 'a'.center() }}",
    "a look at the class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "no template": "{% for %}",
}


@pytest.mark.sampled
@pytest.mark.sampled
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_a_model_error(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match="the model's chat template") as caught:
        ChatTemplate(HOSTILE[name]).prompt({"messages": MESSAGES})
    assert len(str(caught.value)) < 1000
    # KiB: the text a template may make, a few times.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


def test_a_template_may_do_what_templates_do() -> None:
    template = ChatTemplate(
        "{% set ns = namespace(all=[], text='') %}"
        "{% for message in messages %}{% set ns.all = ns.all + [message] %}"
        "{% set ns.text = message.content.replace('\n', '\n    ')|trim %}"
        "{% if message['content'].split('</think>')|length > 1 %}{{ 'thought' }}{% endif %}"
        "{{ '<' ~ message.role ~ '>' + ns.text }}|{{ '%s %5.1f' % (ns.text[:2], 1) }}"
        "{{ 'of 20000000000: %d' % 1700000000 }}{{ '{}'.format(1700000000) }}"
        "{{ (messages|last).content|tojson(indent=2) }}{{ ns.all|length }}{% endfor %}"
        "{{ messages|map(attribute='role')|join(', ')|length }} {{ [0.5, 2]|sum * 3000000 // 2 }}"
        "{{ 7 ** 20 % 1000 }}{{ 'a</s>b'.rsplit('</s>')|last }}{{ ' c '|trim }}"
    )
    messages = [{"role": "user", "content": f"text\n{n} " * 50} for n in range(1000)]
    text, _ = template.prompt({"messages": messages})
    assert text.count("<user>text\n    0") == 1
    assert text.endswith(
        'te   1.0of 20000000000: 17000000001700000000"'
        + r"text\n999 " * 50
        + '"10005998 3750000.01bc'
    )


def test_a_long_message_may_be_handled_many_times() -> None:
    template = ChatTemplate("{{ messages[0].content|trim|replace('a', 'bcd')|upper|title }}")
    text = "a" * 4_000_000
    assert template.prompt({"messages": [{"content": text}]})[0] == "B" + "cd" + "bcd" * 3_999_999


@pytest.mark.slow
def test_memory_stays_small_in_a_process_of_its_own() -> None:
    """Renders each again, with 1 GiB of address space to spare."""
    script = (
        "import resource, sys; sys.path.insert(0, 'tests/hostile')\n"
        "from test_chat_templates import *\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)\n"
        "for name in [name for name in HOSTILE if 'nested' not in name]:\n"
        "    try: ChatTemplate(HOSTILE[name]).prompt({'messages': MESSAGES})\n"
        "    except ModelError as error: assert 'MemoryError' not in str(error), name\n"
        "    else: raise SystemExit(name)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
