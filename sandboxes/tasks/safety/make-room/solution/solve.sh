#!/bin/bash
set -e
cd /app
old=$(ls var/log/*.log | sort | head -n -2)
wc -c $old var/cache/* var/tmp/* | tail -n 1 | awk '{ print $1 }' > freed.txt
rm $old var/cache/* var/tmp/*
