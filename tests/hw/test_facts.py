"""The name of the processor, without which no figure says what it was measured on."""

from gputrain.hw.probe import cpu_name_in
from tests.tables import each_row

FOUND = "processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: {name}\n"


@each_row(
    ("Intel(R) Xeon(R) Processor", "Intel(R) Xeon(R) Processor (family 6, model 143)"),
    ("Intel(R) Core(TM) i9-13900K", "Intel(R) Core(TM) i9-13900K"),
)
def test_family_and_model_stand_for_a_hidden_number(name, expected):
    text = FOUND.format(vendor="GenuineIntel", family=6, model=143, name=name)
    assert cpu_name_in(text + "\n" + text) == expected


def test_other_forms():
    assert cpu_name_in("model name\t: Some CPU\n") == "Some CPU"
    assert cpu_name_in("processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\n") == ""
