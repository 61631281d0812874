// Every processor that the compiler's default target is for.
#define VARIANT portable
#define VARIANT_NAME "portable"
#include "variant.h"
