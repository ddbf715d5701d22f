// SPDX-License-Identifier: Apache-2.0
// Headers of other libraries define these words as macros, and a program may include such a header
// first: <windows.h> and headers for old compilers define `near`, `far` and `small`, those of X11
// `None`, `Bool` and `Status`, those of Qt `slots`, `signals` and `emit`. This file compiles
// because our headers use none of them as a name.
#define near
#define far
#define small char
#define interface struct
#define IN
#define OUT
#define ERROR 0
#define None 0L
#define Bool int
#define Status int
#define True 1
#define False 0
#define Success 0
#define slots
#define signals public
#define emit
#define foreach
#define forever for (;;)

#include <spillway/spillway.hpp>
