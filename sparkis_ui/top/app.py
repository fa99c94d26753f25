"""The terminal's screen: a line of numbers, a graph, and a table that is chosen, sorted and filtered by keys."""

from __future__ import annotations

from contextlib import suppress
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Sparkline, Static, Tab, Tabs

from sparkis_ui.client import Endpoint, SignInError
from sparkis_ui.polling import Hub
from sparkis_ui.text import clock
from sparkis_ui.top.tables import BAD, GOOD, TABLES, WARNING, Cell, Order, rows_of, summary_of

STYLES = {"": "", GOOD: "green", WARNING: "yellow", BAD: "bold red"}
BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # columns from which a screen has a class
HELP = """\
[b]sparkis top[/b]: what an endpoint of sparkis holds and does, read once a second

  [b]1[/b] to [b]6[/b], [b]tab[/b]   choose a table
  [b]<[/b] and [b]>[/b]      sort by the column to the left or right
  [b]r[/b]            sort the other way round
  [b]/[/b]            show the rows that contain a text; [b]Esc[/b] shows all again
  [b]p[/b]            pause, and go on
  [b]q[/b]            end

[b]Jobs[/b] begin with what is failing, stale or behind.
BEHIND: epochs that are committed, and not readable yet.
AGE: the time since the commit of the readable epoch.
LAG of a server: of its job that is furthest behind.
TIME of a command: its part of the time of all commands.

Any key closes this help."""


class Help(ModalScreen[None]):
    """The keys, and the meaning of the columns."""

    def compose(self) -> ComposeResult:
        """Yield the text."""
        yield Static(HELP, id="help")

    def on_key(self) -> None:
        """Close at any key."""
        self.dismiss()

    def on_click(self) -> None:
        """Close at a click."""
        self.dismiss()


class Top(App[None]):
    """Shows an endpoint's facts until the user quits. refusal: the reason if the program ended by itself."""

    TITLE = "sparkis top"
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = "DataTable"  # after the help: Textual's own choice may be the hidden filter, which takes all keys
    CSS = """
    #where { height: auto; max-height: 4; background: $primary; color: $text; padding: 0 1; }
    #where.lost { background: $error; }
    #numbers { height: auto; max-height: 5; }
    #summary { width: 1fr; height: auto; padding: 0 1; }
    #graph { width: 30; height: 2; margin: 0 1; }
    .-narrow #graph { display: none; }
    #filter { display: none; border: none; height: 1; }
    #filter.shown { display: block; }
    DataTable { height: 1fr; }
    #empty { height: 1fr; padding: 1 2; color: $text-muted; display: none; }
    Help { align: center middle; }
    #help { width: auto; max-width: 100%; height: auto; max-height: 100%; overflow-y: auto; }
    #help { padding: 1 3; border: round $primary; background: $surface; }
    """
    HORIZONTAL_BREAKPOINTS = BREAKPOINTS
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(index + 1), f"choose({index})", table.title, show=False) for index, table in enumerate(TABLES)),
        Binding("tab", "next", "next table"),
        Binding("shift+tab", "next(-1)", "table before", show=False),
        Binding("less_than_sign", "sort(-1)", "sort left", key_display="<"),
        Binding("greater_than_sign", "sort(1)", "sort right", key_display=">"),
        Binding("r", "reverse", "reverse"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("escape", "all_rows", "all rows", show=False),
        Binding("p", "pause", "pause"),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "quit", "end"),
    ]

    def __init__(self, endpoint: Endpoint, table: str) -> None:
        super().__init__()
        self.refusal = ""
        self._hub = Hub(endpoint)
        self._table = next(each for each in TABLES if each.name == table)
        self._orders: dict[str, Order] = {}
        self._is_paused = False
        self._is_shown = self._is_to_end = False

    # -- the screen -------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """Yield the widgets, from the top of the screen to its foot."""
        yield Static(id="where", markup=False)
        with Horizontal(id="numbers"):
            yield Static(id="summary")
            yield Sparkline(id="graph")
        yield Tabs(
            *(Tab(f"{index + 1} {table.title}", id=table.name) for index, table in enumerate(TABLES)),
            active=self._table.name,
        )
        yield Input(placeholder="rows that contain …", id="filter")
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Static(id="empty", markup=False)
        yield Footer()

    def end(self) -> None:
        """End at a signal; while the screen is being made, once it is there, because Textual cannot end before."""
        self._is_to_end = True
        if self._is_shown:
            self.exit()

    def on_ready(self) -> None:
        """End now, if a signal came before."""
        self._is_shown = True
        if self._is_to_end:
            self.exit()

    def on_mount(self) -> None:
        """Begin to read."""
        self.query_one(Tabs).can_focus = False
        self.query_one(DataTable).focus()
        self._show()
        self._follow()

    @work
    async def _follow(self) -> None:
        """Show the facts of each turn."""
        try:
            while True:
                await self._hub.poll(self._table.groups)
                if not self._is_paused:
                    self._show()
                await self._hub.wait_for_turn(self._hub.turn + 1)
        except SignInError as error:
            self.refusal = f"{error}: give a user and a password in --url"
            self.exit()

    async def on_unmount(self) -> None:
        """End the connections."""
        await self._hub.close()

    # -- keys and clicks ----------------------------------------------------------------------------------------------

    def action_choose(self, index: int) -> None:
        """Show a table."""
        self.query_one(Tabs).active = TABLES[index].name

    def action_next(self, step: int = 1) -> None:
        """Show the next table."""
        self.action_choose((TABLES.index(self._table) + step) % len(TABLES))

    def on_tabs_tab_activated(self, event: Tabs.TabActivated) -> None:
        """Show the table of a tab, at once with the facts that are there."""
        self._table = next(table for table in TABLES if table.name == event.tab.id)
        self.query_one(DataTable).clear(columns=True)
        self._show()
        self._read_now()

    @work(exclusive=True, group="read")
    async def _read_now(self) -> None:
        """Read the facts of a table that was just chosen."""
        with suppress(SignInError):  # `_follow` ends the program
            await self._hub.poll(self._table.groups)
        self._show()

    def action_sort(self, step: int) -> None:
        """Sort by the column beside the present one."""
        column = self._order.column
        columns = len(self._table.columns)
        self._sort_by((0 if step > 0 else columns - 1) if column is None else (column + step) % columns)

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sort by a column that was clicked."""
        self._sort_by(event.column_index)

    def action_reverse(self) -> None:
        """Sort the other way round."""
        self._sort_by(self._order.column or 0)

    def action_filter(self) -> None:
        """Ask for a text."""
        field = self.query_one(Input)
        field.add_class("shown")
        field.focus()

    def on_input_changed(self) -> None:
        """Show the rows that contain the text."""
        self._show()

    def on_input_submitted(self) -> None:
        """Go back to the table, with the text."""
        self.query_one(DataTable).focus()

    def action_all_rows(self) -> None:
        """Show all rows again."""
        field = self.query_one(Input)
        field.value = ""
        field.remove_class("shown")
        self.query_one(DataTable).focus()

    def action_pause(self) -> None:
        """Stop showing new facts, or go on."""
        self._is_paused = not self._is_paused
        self._show()

    def action_help(self) -> None:
        """Show the help."""
        self.push_screen(Help())

    # -- what is shown ------------------------------------------------------------------------------------------------

    @property
    def _order(self) -> Order:
        return self._orders.get(self._table.name, Order())

    def _sort_by(self, column: int) -> None:
        self._orders[self._table.name] = self._order.by(self._table, column)
        self._show()

    def _show(self) -> None:
        hub, screen = self._hub, self.screen_stack[0]
        found = hub.facts
        if not screen.query("#where"):  # the program ends
            return
        where = screen.query_one("#where", Static)
        rows, count = rows_of(self._table, found, self._order, screen.query_one(Input).value)
        where.set_class(hub.error is not None, "lost")
        where.update(self._where(f"the first {len(rows):,} of {count:,} rows" if count > len(rows) else ""))
        numbers = [Text.assemble((text, "bold"), f" {name}") for name, text in summary_of(found, self._latest)]
        half = len(numbers) // 2
        lines = (Text("   ").join(numbers[:half]), Text("   ").join(numbers[half:]))
        screen.query_one("#summary", Static).update(Text("\n").join(lines))
        screen.query_one("#graph", Sparkline).data = [value or 0 for value in hub.series.of("requests")]
        table = screen.query_one(DataTable)
        empty = screen.query_one("#empty", Static)
        table.display, empty.display = bool(rows), not rows
        if not rows:
            empty.update(self._nothing(found.at_s))
            return
        self._fill(table, rows)
        if screen.focused is None:  # an empty table was hidden, and a hidden widget loses the focus
            table.focus()

    def _where(self, part: str) -> str:
        """Return the first line.

        Args:
            part: Says that only a part of the rows is shown.
        """
        hub = self._hub
        info = hub.facts.info
        parts = [hub.endpoint.url, f"sparkis {info['sparkis_version']}" if "sparkis_version" in info else ""]
        if hub.error is not None:
            parts.append(f"{hub.error}, since {clock(hub.lost_since_s)} UTC; trying again")
        elif hub.facts.at_s:
            parts.append(f"{clock(hub.facts.at_s)} UTC")
        else:
            parts.append("connecting")
        return "  ".join(filter(None, [*parts, part, "PAUSED" if self._is_paused else ""]))

    def _nothing(self, at_s: float) -> str:
        errors = self._hub.facts.errors
        refused = next((errors[group] for group in self._table.groups if group in errors), "")
        if self.query_one(Input).value:
            return "no row contains the text; Esc shows all"
        return refused or (self._table.empty if at_s else "")

    def _latest(self, name: str) -> float | None:
        return next(reversed(self._hub.series.of(name)), None)

    def _fill(self, table: DataTable[Text], rows: list[tuple[str, list[Cell]]]) -> None:
        """Show rows; the cursor stays on its row, and the table where it was scrolled to."""
        at, top = self._row_at_cursor(table), table.scroll_offset
        table.clear(columns=True)
        for index, column in enumerate(self._table.columns):
            title = self._order.title_of(self._table, index)
            table.add_column(Text(title, justify="right" if column.is_number else "left"))
        for name, cells in rows:
            texts = [
                Text(cell.text, style=STYLES[cell.severity], justify="right" if column.is_number else "left")
                for cell, column in zip(cells, self._table.columns, strict=True)
            ]
            table.add_row(*texts, key=name)
        if at is not None and at in table.rows:
            table.move_cursor(row=table.get_row_index(at), animate=False, scroll=False)
        table.scroll_to(top.x, top.y, animate=False)

    def _row_at_cursor(self, table: DataTable[Text]) -> str | None:
        if not table.row_count:
            return None
        return table.coordinate_to_cell_key(Coordinate(table.cursor_row, 0)).row_key.value
