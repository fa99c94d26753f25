#!/bin/sh
# The dashboard with redis-cli alone: sh examples/dashboard.sh PORT [SECONDS]
# -r and -i repeat a command; -r -1 repeats it until Ctrl-C.
port=${1:?the server port is missing: sh examples/dashboard.sh PORT [SECONDS]}
exec redis-cli -p "$port" -r "${2:--1}" -i 1 MGET \
  sensors:temperature:sensor_1 sensors:temperature:sensor_2 sensors:temperature:sensor_3 \
  sensors:temperature:sensor_4 sensors:temperature:sensor_5
