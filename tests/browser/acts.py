"""What the tests of the explorers do and look for, whichever the explorer."""
from playwright.sync_api import expect


def changes(seen, area, act):
    """Do something and wait until the picture is another one."""
    before = area.locator("svg").first.inner_html()
    act()
    seen.page.wait_for_function("([svg, before]) => svg.innerHTML !== before || !svg.isConnected",
                                arg=[area.locator("svg").first.element_handle(), before])


def press(seen, control, *keys):
    control.focus()
    for key in keys:
        seen.page.keyboard.press(key)


def field(area, label):
    """The input that stands beside a label."""
    return area.locator(".widget-inline-hbox", has=area.page.get_by_text(label, exact=True)).locator("input:visible").first


def slider(area, label):
    return area.locator(".widget-slider", has=area.page.get_by_text(label, exact=True))


def says(area, *words):
    """The picture comes to contain the words; it may still be on its way."""
    for part in words:
        expect(area.locator("svg").first).to_contain_text(part, timeout=30_000)
