"""The bench: times of one combination, beside the limits that the machine sets."""

CHART_NAME = "chart.png"
