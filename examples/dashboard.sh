#!/bin/sh
# The dashboard with nothing but redis-cli: sh examples/dashboard.sh PORT [SECONDS]
# -r and -i repeat a command; -1 is for ever.
port=${1:?say where the job is served: sh examples/dashboard.sh PORT [SECONDS]}
exec redis-cli -p "$port" -r "${2:--1}" -i 1 MGET \
  sensors:temperature:sensor_1 sensors:temperature:sensor_2 sensors:temperature:sensor_3 \
  sensors:temperature:sensor_4 sensors:temperature:sensor_5
