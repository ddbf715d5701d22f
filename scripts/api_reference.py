# SPDX-License-Identifier: Apache-2.0
"""Makes reference pages from the doc comments of the names that docs/api.md lists. scripts/build-site.py uses this module.

Doxygen reads the headers and writes XML. This module turns the XML into Markdown, one page for each header. Names that
docs/api.md does not list are left out, even if they are in the same header.
"""
import os
import pathlib
import re
import subprocess
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "include" / "spillway"
ROW = re.compile(r"^\| (`[^|]*) \| \[[^\]]*\]\(\.\./include/spillway/([^)]*)\) \|", re.MULTILINE)

# The input filter makes separate paragraphs of lines such as `Threads  thread-safe.` in class comments, and removes trailing
# constraints of functions, which Doxygen takes for function bodies. Undocumented parameters are no warning: the project leaves
# them out if their names say enough.
SETTINGS = r"""
INPUT = {include}
RECURSIVE = YES
FILE_PATTERNS = *.hpp
EXCLUDE = {include}/interop/framework {include}/interop/tensorflow {include}/interop/torch
STRIP_FROM_PATH = {root}/include
OUTPUT_DIRECTORY = {folder}
GENERATE_HTML = NO
GENERATE_LATEX = NO
GENERATE_XML = YES
XML_PROGRAMLISTING = NO
HAVE_DOT = NO
EXTRACT_ALL = YES
PREDEFINED = SPILLWAY_WITH_LZ4 SPILLWAY_WITH_XXHASH SPILLWAY_WITH_ZSTD "SPILLWAY_COMPILED_PART(...)=" "SPILLWAY_CHECK_MODEL(...)="
MACRO_EXPANSION = YES
EXPAND_ONLY_PREDEF = YES
JAVADOC_AUTOBRIEF = YES
ALIASES = "stream=@par Streams^^" "threads=@par Threads^^" "cost=@par Cost^^" "titled{{1}}=@par \1^^"
INPUT_FILTER = "sed -E 's#^( *)/// (Shape|Units|Threads|Streams|Address|Memory|Cost)  +(.*)#\1/// @titled{{\2}} \3#; s# requires [A-Za-z:_<>]+ \{{$# {{#'"
QUIET = YES
WARN_IF_UNDOCUMENTED = NO
WARN_IF_INCOMPLETE_DOC = NO
WARN_LOGFILE = {folder}/warnings
"""
# A warning that is Doxygen's own mistake: it takes a template of `std` for one of the project.
HARMLESS = "scope for class std::"


def listed() -> dict[str, list[str]]:
    """Returns the names that docs/api.md lists, by header."""
    found: dict[str, list[str]] = {}
    for names, header in ROW.findall((ROOT / "docs" / "api.md").read_text()):
        found.setdefault(header, []).extend(re.findall(r"`(\w+)`", names))
    return found


def page_of(header: str) -> str:
    """Returns the path of a header's page in the site."""
    return f"reference/{header.removesuffix('.hpp')}.md"


def tidy(code: str) -> str:
    """Returns a declaration on one line, spaced as in the headers."""
    code = re.sub(r"(?<!<)([<(]) (?!<)", r"\1", " ".join(code.split()))
    code = re.sub(r" (?=[>,)])", "", code)
    code = re.sub(r" ([&*]+)(?=[\w.])", r"\1 ", code)
    return re.sub(r"(?<!operator)(?<=[\w>])=(?=[^=])", " = ", code)


def text_of(node) -> str:
    return "".join(node.itertext()) if node is not None else ""


class Markdown:
    """Turns Doxygen's descriptions into Markdown. `place_of` returns the link for a Doxygen reference, or None."""

    def __init__(self, place_of):
        self.place_of = place_of

    def inline(self, node) -> str:
        """Returns the text of a node and of its children, on one line except for blocks such as lists."""
        parts = [self.escaped(node.text)]
        for child in node:
            parts += [self.one(child), self.escaped(child.tail)]
        return "".join(parts)

    @staticmethod
    def escaped(text: str | None) -> str:
        return re.sub(r"([*_<\[\]])", r"\\\1", re.sub(r"\s+", " ", text or ""))

    def one(self, node) -> str:
        kind = node.tag
        if kind == "computeroutput":
            name = f"`{' '.join(text_of(node).split())}`"
            reference = node.find("ref")
            place = self.place_of(reference.get("refid")) if reference is not None else None
            return f"[{name}]({place})" if place else name
        if kind == "ref":
            place = self.place_of(node.get("refid"))
            return f"[{text_of(node)}]({place})" if place else self.escaped(text_of(node))
        if kind in ("bold", "emphasis"):
            mark = "**" if kind == "bold" else "*"
            return f"{mark}{self.inline(node).strip()}{mark}"
        if kind == "programlisting":
            for space in node.iter("sp"):
                space.text = " "
            return "\n\n```cpp\n" + "\n".join(text_of(line) for line in node.iter("codeline")) + "\n```\n\n"
        if kind == "verbatim":
            return f"\n\n```\n{text_of(node)}\n```\n\n"
        if kind in ("itemizedlist", "orderedlist"):
            mark = "-" if kind == "itemizedlist" else "1."
            return "\n\n" + "\n".join(f"{mark} {self.inline(item).strip()}" for item in node.findall("listitem")) + "\n\n"
        if kind == "table":
            rows: list[list[str]] = []
            for row in node.findall("row"):
                cells = [self.inline(entry).strip() for entry in row.findall("entry")]
                if cells[0] or not rows:
                    rows.append(cells)
                else:  # an empty first cell: the row continues the one above
                    rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], cells)]
            rows.insert(1, ["---"] * len(rows[0]))
            return "\n\n" + "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows) + "\n\n"
        if kind == "parameterlist":
            return self.parameters(node)
        if kind == "simplesect":
            title = self.inline(node.find("title")).strip() if node.find("title") is not None else \
                {"return": "Returns", "pre": "Precondition", "post": "Postcondition"}.get(node.get("kind"), node.get("kind").capitalize())
            words = " ".join(self.inline(para).strip() for para in node.findall("para"))
            return f"\n\n**{title.rstrip(':')}** {words}\n\n"
        return {"para": lambda: self.inline(node) + " ", "sp": lambda: " ", "ndash": lambda: "–", "mdash": lambda: "—",
                "linebreak": lambda: " "}.get(kind, lambda: self.inline(node))()

    def parameters(self, node) -> str:
        """Returns a list of the parameters, or one sentence about the exceptions."""
        items = [(" ".join(" ".join(text_of(name).split()) for name in item.iter("parametername")),
                  " ".join(self.inline(para).strip() for para in item.find("parameterdescription")))
                 for item in node.findall("parameteritem")]
        if node.get("kind") == "exception":
            thrown = "; ".join(f"`{name}`{words}" if words[:1] in ",;." else
                               f"{name if name.islower() and len(name) < 6 else f'`{name}`'} {words}".strip()
                               for name, words in items)
            return f"\n\n**Throws** {thrown}\n\n"
        return "\n\n" + "\n".join(f"- `{name}`: {words}" for name, words in items) + "\n\n"

    def description(self, member) -> str:
        """Returns the brief and the detailed description of a member or class."""
        blocks = []
        for which in ("briefdescription", "detaileddescription"):
            node = member.find(which)
            blocks += [self.inline(para).strip() for para in (node if node is not None else [])]
        return re.sub(r"\n(?: *\n){2,}", "\n\n", "\n\n".join(filter(None, blocks)))


class Reference:
    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.places: dict[str, tuple[str, str]] = {}  # by Doxygen's id: header and anchor
        self.compounds: dict[str, ElementTree.Element] = {}
        self.members: dict[str, list[ElementTree.Element]] = {}  # of namespaces, by qualified name
        index = ElementTree.parse(folder / "xml" / "index.xml").getroot()
        for compound in index.findall("compound"):
            if compound.get("kind") in ("class", "struct", "concept", "namespace"):
                definition = ElementTree.parse(folder / "xml" / f"{compound.get('refid')}.xml").getroot()[0]
                self.compounds[compound.get("refid")] = definition
                if compound.get("kind") == "namespace":
                    for member in definition.iter("memberdef"):
                        self.members.setdefault(member.findtext("qualifiedname"), []).append(member)
        self.by_name = {one.findtext("compoundname"): one for one in self.compounds.values()}

    def meant(self, header: str, name: str):
        """Returns the class, concept or namespace that a listed name refers to, or the members that have this name."""
        spaces = ["spillway::dlpack"] if header == "interop/dlpack.hpp" else ["spillway", "spillway::literals"]
        for space in spaces:
            if (found := self.by_name.get(f"{space}::{name}")) is not None:
                return found
            here = [one for one in self.members.get(f"{space}::{name}", [])
                    if one.find("location").get("file") == f"spillway/{header}"]
            alias = here[0].find("type/ref") if here and here[0].get("kind") == "typedef" else None
            # An alias without a comment: the name of a class that is compiled lazily. Its documentation is at that class.
            if alias is not None and not text_of(here[0].find("briefdescription")).strip() and \
                    self.compounds.get(alias.get("refid")) is not None:
                return self.compounds[alias.get("refid")]
            if here:
                return here
        return None

    def write(self, folder: pathlib.Path) -> list[str]:
        """Writes the pages. Returns the listed names for which nothing was found."""
        public, missing = listed(), []
        for header, names in public.items():
            for name in names:
                meant = self.meant(header, name)
                if meant is None:
                    missing.append(f"{header}: {name}")
                elif isinstance(meant, list):
                    for member in meant:
                        self.places[member.get("id")] = (header, name)
                else:
                    self.places.setdefault(meant.get("id"), (header, name))
                    for member in meant.iter("memberdef"):
                        self.places[member.get("id")] = (header, self.anchor(name, member))
        for header, names in public.items():
            path = folder / page_of(header)
            path.parent.mkdir(parents=True, exist_ok=True)
            markdown = Markdown(lambda refid, at=header: self.link(at, refid))
            parts = [f"# {header}\n\n`#include <spillway/{header}>`\n"]
            for name in names:
                meant = self.meant(header, name)
                if isinstance(meant, list):
                    parts.append(f"## {name} {{ #{name} }}\n\n" + "\n\n".join(self.member(markdown, one) for one in meant))
                    if (hidden := self.hidden_class(meant)) is not None:
                        parts.append(self.content(markdown, hidden, name, "##"))
                elif meant is not None:
                    parts.append(self.compound(markdown, meant, name, "##"))
            path.write_text("\n\n".join(parts) + "\n")
        return missing

    def link(self, at: str, refid: str) -> str | None:
        if refid not in self.places:
            return None
        header, anchor = self.places[refid]
        there = os.path.relpath(page_of(header), pathlib.PurePosixPath(page_of(at)).parent)
        return f"#{anchor}" if header == at else f"{there}#{anchor}"

    def compound(self, markdown: Markdown, one, name: str, level: str) -> str:
        parts = [f"{level} {name} {{ #{name.replace('::', '.')} }}"]
        if one.get("kind") == "concept":
            code = text_of(one.find("initializer")).replace("spillway::" + name, name)
            return "\n\n".join([*parts, markdown.description(one), f"```cpp\n{code.rstrip()};\n```"])
        if one.get("kind") != "namespace":
            keyword = f"{one.get('kind')} {name.split('::')[-1]}"
            own = one.findtext("compoundname").split("::")[-1]
            is_alias = own != name.split("::")[-1]  # then the template parameters of the class are not shown
            parts.append(f"```cpp\n{'' if is_alias else self.template(one)}{keyword};\n```")
        return "\n\n".join([*parts, self.content(markdown, one, name, level)])

    def hidden_class(self, members):
        """Returns the class that a documented alias names, if the class is in namespace detail, so that only the alias is public."""
        reference = members[0].find("type/ref") if members[0].get("kind") == "typedef" else None
        hidden = self.compounds.get(reference.get("refid")) if reference is not None else None
        is_hidden = hidden is not None and hidden.findtext("compoundname").startswith("spillway::detail::")
        return hidden if is_hidden else None

    def content(self, markdown: Markdown, one, name: str, level: str) -> str:
        """Returns the description of a class, a table of its data members, and its functions under headings."""
        parts = [markdown.description(one)]
        sections = [section for section in one.findall("sectiondef")
                    if section.get("kind").startswith("public") or one.get("kind") == "namespace"]
        members = [member for section in sections for member in section.findall("memberdef")]
        fields = [member for member in members if member.get("kind") == "variable"]
        if fields:
            rows = [f"| `{tidy(self.typed(member))}` | {markdown.description(member).replace(chr(10), ' ').replace('|', chr(92) + '|')} |"
                    for member in fields]
            parts.append("| member | |\n| --- | --- |\n" + "\n".join(rows))
        for inner in one.findall("innerclass"):
            if inner.get("prot") == "public" and inner.get("refid") in self.compounds:
                parts.append(self.compound(markdown, self.compounds[inner.get("refid")],
                                           f"{name}::{inner.text.split('::')[-1]}", level + "#"))
        aliases = [member for member in members if member.get("kind") == "typedef" and not markdown.description(member)]
        if aliases:
            shown = [f"using {member.findtext('name')} = {tidy(text_of(member.find('type')))};" for member in aliases
                     if member.findtext("name") != name]
            parts.append("```cpp\n" + "\n".join(shown) + "\n```" if shown else "")
        own, titles = one.findtext("compoundname").split("::")[-1], set()
        for member in members:
            if member.get("kind") in ("variable", "friend") or member in aliases or not self.is_shown(member):
                continue
            title = member.findtext("name").replace(own, name.split("::")[-1])
            if title not in titles:  # one heading for all overloads
                parts.append(f"{level}# {title} {{ #{self.anchor(name, member)} data-toc-label=\"{title}\" }}")
            titles.add(title)
            parts.append(self.member(markdown, member).replace(own, name.split("::")[-1]))
        return "\n\n".join(filter(None, parts))

    def anchor(self, name: str, member) -> str:
        """Returns the anchor of a member. Members without a heading, such as data members, use the anchor of their class."""
        has_heading = member.get("kind") == "function" and member.get("prot") == "public" and self.is_shown(member)
        name = name.replace("::", ".")
        return f"{name}.{re.sub(r'[^~.' + chr(92) + 'w]+', '-', member.findtext('name'))}" if has_heading else name

    @staticmethod
    def is_shown(member) -> bool:
        name, is_documented = member.findtext("name"), bool(text_of(member.find("briefdescription")).strip())
        is_default = text_of(member.find("argsstring")).endswith(("=default", "=delete"))
        return is_documented or not (is_default or name.startswith(("~", "operator=")))

    @staticmethod
    def template(one) -> str:
        parameters = one.find("templateparamlist")
        if parameters is None:
            return ""
        shown = []
        for parameter in parameters:
            text = f"{text_of(parameter.find('type'))} {text_of(parameter.find('declname'))}".strip()
            default = text_of(parameter.find("defval"))
            shown.append(text + (f" = {default}" if default else ""))
        clause = one.find("requiresclause")
        return f"template <{', '.join(shown)}>\n" + (f"  requires {text_of(clause).strip()}\n" if clause is not None else "")

    @staticmethod
    def typed(member) -> str:
        constant = "static " if member.get("static") == "yes" else ""
        value = text_of(member.find("initializer"))
        return f"{constant}{text_of(member.find('type'))} {member.findtext('name')} {value}"

    def member(self, markdown: Markdown, member) -> str:
        name, kind = member.findtext("name"), member.get("kind")
        if kind == "enum":
            code = f"enum class {name};"
            rows = [f"| `{value.findtext('name')}` | {markdown.description(value)} |" for value in member.findall("enumvalue")]
            table = "\n\n| value | |\n| --- | --- |\n" + "\n".join(rows) if rows else ""
        elif kind == "typedef":
            code, table = f"{self.template(member)}using {name} = {text_of(member.find('type'))};", ""
        else:
            before = "static " if member.get("static") == "yes" else ""
            kind = re.sub(r" ([*&]+)$", r"\1", text_of(member.find("type")))
            code = f"{self.template(member)}{before}{kind} {name}{text_of(member.find('argsstring'))};"
            table = ""
        code = "\n".join(tidy(line) if not line.startswith("  ") else line for line in code.split("\n"))
        return f"```cpp\n{code}\n```\n\n{markdown.description(member)}{table}".strip()


def linked(api_page: str) -> str:
    """Returns docs/api.md for the site, where each name is a link to its place in the reference."""
    def row(match: re.Match) -> str:
        names = re.sub(r"`(\w+)`", lambda name: f"[`{name[1]}`]({page_of(match[2])}#{name[1]})", match[1])
        return match[0].replace(match[1], names, 1)

    return ROW.sub(row, api_page)


def write(folder: pathlib.Path, work: pathlib.Path) -> list[str]:
    """Writes the pages into `folder`. Returns the errors: names without a page, and Doxygen's warnings."""
    settings = work / "Doxyfile"
    settings.write_text(SETTINGS.format(include=INCLUDE, root=ROOT, folder=work))
    subprocess.run(["doxygen", settings], check=True)
    warnings = [line for line in (work / "warnings").read_text().splitlines()
                if "warning: " in line and HARMLESS not in line]
    return warnings + [f"docs/api.md lists what Doxygen does not find: {name}" for name in Reference(work).write(folder)]
