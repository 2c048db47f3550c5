r"""Pairs of texts in mathematics: answer @ prediction @ ... Published vectors (V18), spellings of MATH, errors of math-verify."""

from __future__ import annotations

EQUAL = r"""
\frac{1}{2} @ 0.5 @ \frac12 @ 2/4 @ 1:2
5 @ x=5 @ \$5 @ 5\text{ cm} @ 5. @ \text{x = 5} @ \text{The answer is } 5 @ 05 @ 5 apples @ \$5.00 @ {5}
5 @ \displaystyle 5 @ 5\, @ \color{red}{5}
x=5 @ 5
10 @ 10\%
10\% @ 0.1 @ 10 percent
90 @ 90^\circ
0.5 @ .5
11111 @ 11,\! 111
1.5 \times 10^{3} @ 1500
\sqrt[3]{8} @ 2
1\frac12 @ \frac32
\text{Evelyn} @ Evelyn @ \textbf{Evelyn}
3,5 @ 5, 3 @ \{5,3\}
\{3,5\} @ \{5,3\}
(1,2) @ \left( 1, 2 \right) @ (x,y)=(1,2) @ x=1, y=2
(-\infty,2)\cup(3,\infty) @ (3,\infty)\cup(-\infty,2)
x<3 @ (-\infty,3)
1<x\le 2 @ (1,2]
1\pm\sqrt2 @ 1+\sqrt2,1-\sqrt2
1+\sqrt2,1-\sqrt2 @ 1\pm\sqrt2
\text{(A)} @ A
A @ (A)
\begin{pmatrix}1\\2\end{pmatrix} @ \begin{bmatrix}1\\2\end{bmatrix}
2x+1 @ 1+2x @ y=2x+1
(x+1)^2 @ x^2+2x+1
1101_2 @ 1101_{2} @ 1101
x \in [1,2] @ [1,2]
1,2 @ x=1\text{ or }x=2
\frac13 @ 0.333333
\mathbb{R} @ (-\infty,\infty)
3^{10} @ 59049
\binom{5}{2} @ 10
0 @ -0
\log_2 8 @ 3
\infty @ +\infty
\frac{1}{3}:\frac{1}{2} @ 2:3
3\frac{1}{2} @ 3 1/2 @ \frac72
\text{(B)} @ \textbf{(B) } 12
\left( 3, \frac{\pi}{2} \right) @ (3, \dfrac{\pi}{2})
[0,1]\cup[2,3] @ x\in[2,3]\cup[0,1]
-2,2 @ x = \pm 2 @ x=2 \text{ or } x=-2 @ 2 \text{ and } -2
\$32,\!348 @ \$32{,}348 @ 32,348 dollars
\frac{\sqrt{2}}{2} @ \sqrt{\frac12}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} @ \left[\begin{array}{cc}1&2\\3&4\end{array}\right]
x \ge 3 @ [3,\infty)
[3,\infty) @ 3\leqslant x
9\text{ a.m.} @ 9 am
\emptyset @ \{\} @ \varnothing
-\frac{3}{4} @ \frac{3}{-4} @ - 3/4
0.\overline{3} @ \frac13
{10 \choose 3} @ 120
\lfloor 3.7 \rfloor @ 3
\frac{x+1}{x-1} @ -\frac{x+1}{1-x}
16\pi @ 16 \pi \text{ square units}
\text{no solution} @ no solution
1001_2 @ 1001_{\text{two}} @ 1001_{(2)}
\ln 4 @ 2\ln 2
\sin^2 x @ 1-\cos^2 x
\{(2,3),(4,5)\} @ \{(4,5),(2,3)\}
x<5 @ 5>x
1,000,000 @ 10^6
2x+3y=6 @ 4x+6y=12
\text{Monday} @ Monday.
10 \text{ minutes} @ 10 min
\langle 1,2\rangle @ (1,2)
6\text{ and }8 @ 6,8
\dfrac{1}{29,\!322,\!216} @ \frac{1}{29322216}
x \in \{1,2\} @ 1,2
|x-1| @ |1-x|
4\text{:}30 @ 4:30
7\frac{1}{2}\% @ 7.5
0.5\% @ 0.005
"""

DIFFERENT = r"""
x=5 @ y=5
(1,2) @ [1,2] @ (2,1) @ (1,2] @ \{1,2\}
3,5 @ 3,6 @ 3 @ 3,5,5 @ (3,5)
5 @ 6 @ 5 or 6 @ -5 @ 5,6 @ (5,6) @ \{5,6\} @ five or six
1101_2 @ 13
5\text{ cm} @ 5\text{ m}
x<3 @ x\le 3 @ x>3
10\% @ 0.01 @ 1000
1 @ 1.0001
\begin{pmatrix}1\\2\end{pmatrix} @ \begin{pmatrix}2\\1\end{pmatrix} @ (1,2)
\begin{pmatrix}1&2\end{pmatrix} @ \begin{pmatrix}1\\2\end{pmatrix}
(3,5) @ 3,5
2 @ \pm 2 @ 2^1000
1,2 @ \{1\} @ (1,2)
12,34 @ 1234
1,234 @ 1,2,3,4 @ 1,2,34
a @ A
3 @ 3x
(1,2),(3,4) @ (1,3),(2,4) @ (1,4),(3,2)
10:30 @ 10.5
x=1,y=2 @ x=2,y=1
i @ -i @ 1
\sqrt{2} @ 1.41 @ 2
9\text{ a.m.} @ 9 p.m.
\frac{1}{3} @ 0.33 @ 0.3334
\pi @ 3.14 @ \frac{22}{7}
\begin{pmatrix}1&2\\3&4\end{pmatrix} @ \begin{pmatrix}1&3\\2&4\end{pmatrix} @ \begin{vmatrix}1&2\\3&4\end{vmatrix}
x=3 @ x \ge 3
1 \pm \sqrt2 @ 1 + \sqrt2
\text{Evelyn} @ Eve
0 @ \emptyset @ \{\}
\emptyset @ \{0\}
\infty @ -\infty
[0,1]\cup[2,3] @ [0,3]
"""

# relations, sentences, rounded tails, labelled ratios, factorials, debris of TeX
SAME = r"""
\frac{1}{2^{99}} @ 2^{-99}
\sqrt{1/n} @ \frac{1}{\sqrt{n}}
\sqrt{a}\sqrt{b} @ \sqrt{ab}
\sqrt{5+2\sqrt{6}} @ \sqrt{2}+\sqrt{3}
10^{-7} @ 0.0000001
x\ge 3 @ x>=3 @ x >= 3
[3,\infty) @ x>=3
1\le x\le 2 @ 1<=x<=2
x\ne 3 @ x != 3
x-y<2 @ y-x>-2
-1<x<5 @ x\in(-1,5) @ x>-1 \text{ and } x<5 @ x > -1, x < 5
(-1,5) @ 5>x>-1 @ \{x : -1<x<5\} @ \{x \mid -1<x<5\} @ \{x\in\mathbb{R} \mid -1<x<5\} @ x \text{ is in } (-1,5)
(-\infty,1)\cup(3,\infty) @ x<1 \text{ or } x>3
|x|<2 @ (-2,2)
y=2x+1 @ x=\frac{y-1}{2} @ 2x-y+1=0
(1,2),(3,4) @ (x,y)=(3,4),(1,2) @ (x,y)=(3,4)\text{ or }(x,y)=(1,2) @ (x,y) = (1,2) \text{ and } (3,4)
(1,2),(3,4) @ \{(3,4),(1,2)\} @ (3,4)\text{ and }(1,2)
\left[-2,\frac{1}{3}\right) @ [-2, 0.333333)
7:32 @ a:b = 7:32 @ a/b = 7/32 @ \frac{a}{b}=\frac{7}{32} @ \text{ratio } = 7:32 @ 7 \text{ to } 32 @ 7 to 32
12\pi @ 12\pi\approx 37.7 @ 12\pi = 37.699\ldots @ 12\pi \text{ (approximately 37.7)}
37.7 @ 12\pi\approx 37.7
\sqrt{2} @ \sqrt2 \approx 1.414 \text{ cm} @ \sqrt2 \ (\approx 1.414)
5 @ 5\] @ 5$ @ 5 \\ @ 5\end{align*} @ 5 \blacksquare @ 5 \tag{1} @ 5\hfill @ 5 \text{.} @ 5} @ \(5\) @ \[5\]
5 @ 5 \ldots @ & 5 @ =5 @ \$5\$ @ 5 {} @ \text{The answer is }5\text{.} @ \text{Therefore, } x = 5
5 @ \text{the value of } x \text{ is } 5 @ \text{So the final answer is: } 5 @ \text{Area } = 5 \text{ square units}
120 @ 5!
\frac{8!}{3!5!} @ 56
n! @ n(n-1)!
\frac{(2n)!}{n!} @ \frac{(2n)!}{n!}
12 @ \text{There are } 12 \text{ ways.} @ There are 12 ways @ \text{He needs 12 apples in total.}
2,3 @ \text{The solutions are } 2 \text{ and } 3
\text{(C)} @ \text{The correct answer is (C)}
C @ \text{Option C} @ \text{C: } 12 @ C) 12
(1,2),(3,4) @ (3,4),(1,2),(3,4) @ (1,2),(3,4),(1,2)
3:4 @ AB:BC = 3:4 @ A:B = 3:4
(2,-3) @ p=2, q=-3 @ (p,q)=(2,-3) @ q=-3, p=2
p=2, q=-3 @ (2,-3) @ (p,q)=(2,-3)
(5,3) @ n=5, k=3
-1 @ e^{i\pi} = -1 @ i^2 = -1
e^{i\pi}=-1 @ -1
1 @ \lim_{x\to 0} \frac{\sin x}{x} = 1
\lim_{x\to0}\frac{\sin x}{x}=1 @ 1
\frac{1}{3} @ \int_0^1 x^2\,dx = \frac{1}{3}
e @ \lim_{n\to\infty}\left(1+\frac1n\right)^n = e
\frac{3}{8} @ \Pr(A)=\frac{3}{8}
2\sqrt2 @ |2+2i| = 2\sqrt2
1250 @ \text{He earns } \$1,250 \text{ per month} @ \text{The area is } 1,250 \text{ cm}^2
17 @ \text{We add } 8+9 \text{ to get } 17. \text{ Final answer: } 17 @ x^2 = 289, \text{ so } x = 17. \text{ Final answer: } 17
7 @ 7\ @ x = 7 \
\left(-\frac{3}{4},\frac{1}{8}\right) @ (-0.75, 0.125) @ x\in(-.75,.125)
x \in (0, \frac{3}{2}] @ 0<x\le 1.5 @ 0 < x \leq \frac32 @ 1.5 \ge x > 0
(1,2,3),(4,5,6) @ (4,5,6),(1,2,3),(4,5,6)
9:16 @ A_1:A_2 = 9:16 @ S_{1}:S_{2}=9:16 @ \text{The ratio is } 9:16
60 @ 1 \text{ hour} = 60 \text{ minutes}
12 @ 3 \text{ cm} \times 4 \text{ cm} = 12 \text{ cm}^2 @ 3 \cdot 4 = 12 \text{ cm}
0.33 @ \frac13 = 0.33
2.5 @ 2\frac12 = 2.5
13 @ 1101_2 = 13
\frac{\pi}{4} @ 45^\circ = \frac{\pi}{4}
6 @ \gcd(12, 18) = 6 @ \binom{4}{2} = 6
2 @ \log 100 = 2
1 @ 0.\overline{9} = 1
42 @ \text{Using } x=6, \text{ we find } 7x. \text{ Final answer: } 42
"""

OTHER = r"""
\frac{1}{2^{99}} @ \frac{1}{2^{98}}
\frac{1}{2^{20}} @ \frac{1}{2^{21}}
10^{-7} @ 2\cdot 10^{-7}
\sqrt{10^{12}+1} @ 10^6
e^{-100} @ e^{-101} @ 0
\sqrt{x^2} @ x
|xy| @ xy
\frac{1}{700000} @ 0.000001
x^2=4 @ x=2
5!=120 @ 5
x\ne 3 @ x=3
x<3 @ -x<-3 @ -x>3 @ -x > -3, x < 2
-1<x<5 @ x<-1 \text{ or } x>5 @ x>-1 @ x\in[-1,5]
(-1,5) @ \{x : -1\le x<5\} @ \{x : x<5\}
y=2x+1 @ x=\frac{y+1}{2} @ y=1-2x
x+y=1 @ x-y=1 @ 0=0 @ x=1
x=1 @ x+y=1
y=2x @ y^2=2xy
(1,2),(3,4) @ (1,2) @ (2,1),(4,3)
7:32 @ b:a = 32:7 @ 32 to 7 @ a:b = 7:33
12\pi @ 13\pi\approx 37.7 @ 12 \approx 12\pi
5 @ 4.9\approx 5 @ 6\tag{5} @ 5, 6 \blacksquare @ \text{The answer is not } 5 @ \text{The answer is } 5 \text{ or } 6
5 @ \text{at least 5} @ \text{There are more than 5 ways} @ \text{either 5 or 6} @ \text{if x = 3 then it is 5}
5 @ \text{The values are 5, 6} @ \text{The answer is 5} \text{ if } x>0 @ \text{five is the answer, I guess 6}
37.7 @ 12\approx 37.7 @ 2\pi\approx 37.7
\sqrt2 @ 1.414 @ 1.4 \approx \sqrt2
n! @ (n-1)! @ n(n-2)!
12 @ \text{There are 12 or 13 ways} @ \text{There are 12 hundred ways} @ \text{It is between 12 and 13}
\text{Evelyn} @ \text{The fastest student is not Evelyn} @ \text{The fastest student is Carla}
C @ \text{Option D} @ \text{Options C and D}
3 @ \text{The answer is } 3x @ \text{The solutions are } 2 \text{ and } 3
|x|<2 @ (-2,2] @ (-3,3)
(-\infty,1)\cup(3,\infty) @ x>1 \text{ and } x<3 @ x<1
1 @ 1 = 2
x=5 @ 5 = x = 6
(1,2),(3,4) @ (1,2),(1,2) @ (1,2),(3,4),(4,3)
3:4 @ AB:BC = 4:3
(2,-3) @ p=-3, q=2 @ q=2, p=-3 @ p=2,p=-3
p=2, q=-3 @ (-3,2) @ (q,p)=(2,-3) @ (p,q)=(2,3)
-1 @ e^{i\pi} = 1 @ i^3 = -1 @ e^{i\pi}+1=0
1 @ \lim_{x\to 0}\frac{\sin x}{x} = 0 @ \lim_{x\to0} f(x) = x @ 2x=1 @ x+y=1
-2\le x\le 7 @ y\in[-2,7]
250 @ \text{He earns } \$1,250 \text{ per month}
17 @ 17. \text{ Final answer: } 18 @ \text{Final answer: } 17. \text{ Final answer: } 18 @ \text{Final answer: } 17 \text{ or } 18
17 @ \text{This is not the final answer: } 17 @ \text{Final answer: } 17x
7 @ -7\ @ \sqrt{50} = 7 @ \frac{50}{7} = 7
5 @ 2+2=5 @ $2 + 2 = 5$ @ x = 2+2 = 5 @ \text{Total} = 2+2 = 5 @ 4 = 5 @ \sqrt{16}=5 @ 3! = 5 @ y = 4.9 = 5
12 @ 3\cdot 5 = 12\text{ cm}
0.33 @ \frac14 = 0.33
1 @ \cos\pi = 1
\left[\frac{2}{3},\frac{11}{7}\right) @ [0.66, 1.57) @ [0.666667, 1.571429]
(3,-7) @ p=3 \text{ or } q=-7
9:16 @ A_1:A_2 = 16:9
"""


def pairs(table: str) -> list[tuple[str, str]]:
    """Yields (answer, prediction) for each prediction of every line."""
    rows = [line.split(" @ ") for line in table.strip().split("\n")]
    return [(answer.strip(), prediction.strip()) for answer, *predictions in rows for prediction in predictions]
